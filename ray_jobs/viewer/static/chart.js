// Line charts over train steps, drawn as SVG at the size they have.

import { h, s, brief, number, percent } from "./dom.js";

const EDGE = { top: 10, right: 14, bottom: 24, left: 46 };
const HEIGHT = 170;
const ROUND = [1.2, 1.6, 2, 3, 4, 5, 6, 8, 10, 12];
const STRIDES = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000];

// `lines`: [{name, points: [[step, value]], kind}]; `kind` chooses the colour, `dashed` the stroke. A point of a line may
// be [step, value, low, high], with its interval. Of `marks` each point is that: a diamond with its interval. `share` shows the values in percent, from 0 to 100%.
export function chart({ title, note, lines, marks = [], share = false, tall = false }) {
  const all = [...lines, ...marks];
  const drawn = { lines, marks, share, steps: all.flatMap((line) => line.points), height: tall ? 260 : HEIGHT };
  const canvas = s("svg", { class: "chart", role: "img", height: drawn.height, "aria-label": spoken(title, all, share) });
  const reading = h("output", { class: "reading" }, latest(all, share));
  const card = h("section", { class: `card plot${tall ? " tall" : ""}` },
    h("div", { class: "plot-head" }, h("h3", {}, title), reading),
    h("p", { class: "soft" }, note), canvas);
  let seen = 0;
  const draw = () => {
    const width = Math.floor(canvas.parentNode?.clientWidth - 28) || 0;
    if (width > 40 && width !== seen) {
      seen = width;
      paint(canvas, drawn, width);
    }
  };
  new ResizeObserver(draw).observe(card);
  canvas.addEventListener("pointermove", (event) => {
    const step = nearest(drawn, event.offsetX, seen);
    if (step !== null) point(canvas, drawn, step, seen, reading);
  });
  canvas.addEventListener("pointerleave", () => {
    canvas.querySelector(".cursor")?.remove();
    reading.replaceChildren(...latest(all, share));
  });
  return card;
}

function range({ steps: points, share }) {
  const steps = points.map((one) => one[0]);
  const values = points.map((one) => one[1]);
  let low = Math.min(0, ...values);
  const high = share ? 1 : roundUp(Math.max(0, ...values)) || (low < 0 ? 0 : 1);
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

function scales(drawn, width) {
  const { low, high, first, last } = range(drawn);
  const across = (step) => EDGE.left + ((step - first) / (last - first)) * (width - EDGE.left - EDGE.right);
  const up = (value) => drawn.height - EDGE.bottom - ((value - low) / (high - low)) * (drawn.height - EDGE.top - EDGE.bottom);
  return { low, high, first, last, across, up };
}

// Whole steps at even distances, as many as the width has room for.
function ticks(first, last, width) {
  const room = Math.max(2, Math.floor(width / 60));
  const stride = STRIDES.find((one) => (last - first) / one <= room) ?? Math.ceil((last - first) / room);
  const found = [];
  for (let step = Math.ceil(first / stride) * stride; step <= last; step += stride) found.push(step);
  return found;
}

function paint(canvas, drawn, width) {
  const { low, high, first, last, across, up } = scales(drawn, width);
  const { height, share } = drawn;
  canvas.setAttribute("width", width);
  canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
  canvas.replaceChildren();
  for (const part of [0, 0.5, 1]) {
    const value = low + part * (high - low);
    canvas.append(s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: up(value), y2: up(value) }),
      s("text", { x: EDGE.left - 6, y: up(value) + 4, "text-anchor": "end" }, share ? `${100 * value}%` : number(value, high - low < 0.1 ? 3 : 2)));
  }
  ticks(first, last, width).forEach((step, index) => canvas.append(
    s("text", { x: across(step), y: height - 6, "text-anchor": "middle" }, index ? String(step) : `step ${step}`)));
  const whisker = (kind, x, from, to) => s("line", { class: `whisker ${kind}`, x1: x, x2: x, y1: up(from), y2: up(to) });
  for (const line of drawn.lines) {
    canvas.append(...line.points.filter((one) => one.length > 2).map(([step, , from, to]) => whisker(line.kind, across(step), from, to)));
    const path = line.points.map(([step, value], index) => `${index ? "L" : "M"}${across(step).toFixed(1)} ${up(value).toFixed(1)}`);
    canvas.append(s("path", { class: `line ${line.kind}${line.dashed ? " dashed" : ""}`, d: path.join("") }));
    if (line.points.length <= 40) {
      canvas.append(...line.points.map(([step, value]) => s("circle", { class: `dot ${line.kind}`, cx: across(step), cy: up(value), r: 2.4 })));
    }
  }
  for (const mark of drawn.marks) {
    for (const [step, value, low_, high_] of mark.points) {
      const [x, y] = [across(step), up(value)];
      canvas.append(whisker(mark.kind, x, low_, high_),
        s("path", { class: `mark ${mark.kind}`, d: `M${x} ${y - 7}l7 7l-7 7l-7 -7z` }));
    }
  }
}

function nearest(drawn, x, width) {
  if (!width) return null;
  const { first, last } = range(drawn);
  const step = first + ((x - EDGE.left) / (width - EDGE.left - EDGE.right)) * (last - first);
  const steps = drawn.steps.map((one) => one[0]);
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
}

function point(canvas, drawn, step, width, reading) {
  const { across } = scales(drawn, width);
  canvas.querySelector(".cursor")?.remove();
  canvas.append(s("line", { class: "cursor", x1: across(step), x2: across(step), y1: EDGE.top, y2: drawn.height - EDGE.bottom }));
  const there = [...drawn.lines, ...drawn.marks].map((line) => [line, line.points.find((one) => one[0] === step)]);
  reading.replaceChildren(h("span", { class: "at" }, `step ${step}`), ...there.filter(([line, one]) => one || drawn.lines.includes(line)).map(([line, one]) => value(line, one, drawn.share)));
}

function value(line, at, share) {
  const said = at ? (share ? percent(at[1]) : brief(at[1])) : "\u2013";
  return h("span", { class: `key ${line.kind}${line.dashed ? " dashed" : ""}` }, line.name ? `${line.name} ` : "", h("b", {}, said));
}

function latest(lines, share) {
  return lines.map((line) => value(line, line.points.at(-1), share));
}

function spoken(title, lines, share) {
  const say = (one) => (share ? percent(one) : brief(one));
  const said = lines.map((line) => {
    const [first, last] = [line.points[0], line.points.at(-1)];
    return `${line.name || "value"} ${say(first[1])} at step ${first[0]}, ${say(last[1])} at step ${last[0]}`;
  });
  return `${title}: ${said.join("; ")}`;
}
