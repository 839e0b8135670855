// Line charts over train steps, drawn as SVG at the size they have.

import { h, s, number } from "./dom.js";

const EDGE = { top: 10, right: 12, bottom: 24, left: 46 };
const HEIGHT = 170;
const ROUND = [1.2, 1.6, 2, 3, 4, 5, 6, 8, 10, 12];

// `lines`: [{name, points: [[step, value]], kind}]; `kind` chooses the colour.
export function chart({ title, note, lines, top = null }) {
  const canvas = s("svg", { class: "chart", role: "img", height: HEIGHT, "aria-label": spoken(title, lines) });
  const reading = h("output", { class: "reading" }, latest(lines));
  const card = h("section", { class: "card plot" },
    h("div", { class: "plot-head" }, h("h3", {}, title), reading),
    h("p", { class: "soft" }, note), canvas);
  let seen = 0;
  const draw = () => {
    const width = Math.floor(canvas.parentNode?.clientWidth - 28) || 0;
    if (width > 40 && width !== seen) {
      seen = width;
      paint(canvas, lines, width, top);
    }
  };
  new ResizeObserver(draw).observe(card);
  canvas.addEventListener("pointermove", (event) => {
    const step = nearest(lines, event.offsetX, seen);
    if (step !== null) mark(canvas, lines, step, seen, reading);
  });
  canvas.addEventListener("pointerleave", () => {
    canvas.querySelector(".cursor")?.remove();
    reading.replaceChildren(...latest(lines));
  });
  return card;
}

function range(lines, top) {
  const points = lines.flatMap((line) => line.points);
  const steps = points.map((point) => point[0]);
  const values = points.map((point) => point[1]);
  let low = Math.min(0, ...values);
  const high = top ?? roundUp(Math.max(...values, low < 0 ? 0 : 1e-9));
  if (low < 0) low = -roundUp(-low);
  const first = Math.min(...steps);
  return { low, high, first, last: Math.max(...steps, first + 1) };
}

// A little above the value, so that it and its half read well beside an axis.
function roundUp(value) {
  if (value <= 0) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * ROUND.find((one) => one * unit >= value * 1.02);
}

function scales(lines, width, top) {
  const { low, high, first, last } = range(lines, top);
  const across = (step) => EDGE.left + ((step - first) / (last - first)) * (width - EDGE.left - EDGE.right);
  const up = (value) => HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  return { low, high, first, last, across, up };
}

function paint(canvas, lines, width, top) {
  const { low, high, first, last, across, up } = scales(lines, width, top);
  canvas.setAttribute("width", width);
  canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  canvas.replaceChildren();
  for (const part of [0, 0.5, 1]) {
    const value = low + part * (high - low);
    canvas.append(s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: up(value), y2: up(value) }),
      s("text", { x: EDGE.left - 6, y: up(value) + 4, "text-anchor": "end" }, number(value, high - low < 0.1 ? 3 : 2)));
  }
  for (const [step, anchor] of [[first, "start"], [last, "end"]]) {
    canvas.append(s("text", { x: across(step), y: HEIGHT - 6, "text-anchor": anchor }, `step ${step}`));
  }
  for (const line of lines) {
    const path = line.points.map(([step, value], index) => `${index ? "L" : "M"}${across(step).toFixed(1)} ${up(value).toFixed(1)}`);
    canvas.append(s("path", { class: `line ${line.kind}`, d: path.join("") }));
    if (line.points.length <= 40) {
      canvas.append(...line.points.map(([step, value]) => s("circle", { class: `dot ${line.kind}`, cx: across(step), cy: up(value), r: 2.4 })));
    }
  }
  canvas.dataset.top = top ?? "";
}

function nearest(lines, x, width) {
  const { first, last } = range(lines, null);
  if (!width) return null;
  const step = first + ((x - EDGE.left) / (width - EDGE.left - EDGE.right)) * (last - first);
  const steps = lines.flatMap((line) => line.points.map((point) => point[0]));
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
}

function mark(canvas, lines, step, width, reading) {
  const { across } = scales(lines, width, null);
  canvas.querySelector(".cursor")?.remove();
  canvas.append(s("line", { class: "cursor", x1: across(step), x2: across(step), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
  reading.replaceChildren(h("span", { class: "at" }, `step ${step}`), ...lines.map((line) => value(line, line.points.find((point) => point[0] === step))));
}

function value(line, point) {
  return h("span", { class: `key ${line.kind}` }, line.name ? `${line.name} ` : "", h("b", {}, point ? number(point[1]) : "\u2013"));
}

function latest(lines) {
  return lines.map((line) => value(line, line.points.at(-1)));
}

function spoken(title, lines) {
  const said = lines.map((line) => {
    const [first, last] = [line.points[0], line.points.at(-1)];
    return `${line.name || "value"} ${number(first[1])} at step ${first[0]}, ${number(last[1])} at step ${last[0]}`;
  });
  return `${title}: ${said.join("; ")}`;
}
