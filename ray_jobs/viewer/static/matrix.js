// A group as one picture: siblings are columns, steps are rows, merged where the attempts agree; the colour of a cell is
// the advantage that its step got.

import { link } from "./api.js";
import { attemptName, h, isAnswer, number, outcomeMark, signed, visible } from "./dom.js";

export function matrix({ order, rows }, siblings, run, parted = -1) {
  const of = new Map(siblings.map((row) => [row.id, row]));
  const columns = order.map((id) => of.get(id)).filter(Boolean);
  const most = Math.max(1e-9, ...rows.flat().flatMap((cell) => cell.advantages).filter((one) => one !== null).map(Math.abs));
  const table = h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Step")), columns.map((row) => head(row, run)))),
    h("tbody", {}, rows.map((cells, step) => h("tr", { class: step === parted ? "parted" : "" }, h("th", { scope: "row" }, String(step + 1)), spread(cells, columns.length).map((cell) => (cell.span_only ? gap(cell) : filled(cell, step, columns, most, run)))))));
  table.style.setProperty("--columns", columns.length);
  return h("div", { class: "matrix-box card", tabindex: "0", role: "region", "aria-label": "The attempts step by step" }, table);
}

// The first step at which attempts that had done the same until then decide what their outcome is: null if there is none,
// else the step and the decisions there, each with its attempts and how many of them are right.
export function parting({ order, rows }, siblings) {
  const outcomes = new Map(siblings.map((row) => [row.id, row.outcome]));
  const columns = order.filter((id) => outcomes.has(id)).map((id) => outcomes.get(id));
  const rightIn = ({ first, span }) => columns.slice(first, first + span).filter((outcome) => outcome === 1).length;
  let before = [{ first: 0, span: columns.length }];
  for (const [step, cells] of rows.entries()) {
    for (const parent of before.filter((one) => rightIn(one) > 0 && rightIn(one) < one.span)) {
      const below = cells.filter((cell) => cell.first >= parent.first && cell.first < parent.first + parent.span);
      const pure = (cell) => rightIn(cell) === 0 || rightIn(cell) === cell.span;
      if (below.length > 1 && below.some((cell) => pure(cell) && 2 * cell.span >= Math.min(4, parent.span))) {
        return { step, ways: below.map((cell) => ({ cell, right: rightIn(cell) })).sort((one, other) => other.right / other.cell.span - one.right / one.cell.span) };
      }
    }
    before = cells;
  }
  return null;
}

export function partingLine(found) {
  if (!found) return null;
  return h("p", { class: "parting" }, h("b", {}, `They part at step ${found.step + 1}: `),
    ...found.ways.flatMap(({ cell, right }, index) => [index ? "; " : "", ...[decision(cell)].flat(), ` (${right} of ${cell.span} right)`]), ".");
}

export function matrixLegend() {
  const box = (kind, text) => h("span", {}, h("i", { class: `key-box ${kind}` }), text);
  return h("div", { class: "legend" }, box("up-box", "\u25b2 made likelier"), box("down-box", "\u25bc made less likely"), h("span", {}, "the deeper the colour, the larger the advantage; one cell is one decision with its result, as wide as the attempts that took it"));
}

function head(row, run) {
  return h("th", { scope: "col" }, h("a", { href: link("t", row.id, { run }), class: "attempt" }, outcomeMark(row.outcome), " ", `attempt ${visible(attemptName(row.id))}`),
    h("div", { class: "soft clip", dir: "auto", title: visible(row.answer ?? "") }, !isAnswer(row.answer) ? "no answer" : visible(row.answer)));
}

// The cells of a row, and gaps where attempts have ended.
function spread(cells, width) {
  const found = [];
  let at = 0;
  for (const cell of [...cells, { first: width, span: 0 }]) {
    if (cell.first > at) found.push({ span_only: true, span: cell.first - at });
    if (cell.span) found.push(cell);
    at = cell.first + cell.span;
  }
  return found;
}

function gap({ span }) {
  return h("td", { class: "gap", colspan: span });
}

function filled(cell, step, columns, most, run) {
  const known = cell.advantages.filter((one) => one !== null);
  const mean = known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
  const node = h("td", { class: `move ${mean === null ? "" : mean > 0.005 ? "up-cell" : mean < -0.005 ? "down-cell" : ""}`, colspan: cell.span },
    h("a", { class: "decision", href: link("t", columns[cell.first].id, { run, step: step + 1 }) }, decision(cell)),
    cell.tool_error ? h("div", { class: "wrong clip2" }, `failed: ${visible(cell.tool_error)}`) : null,
    cell.result !== null && !["answer", "think"].includes(cell.action) ? h("div", { class: "soft clip2", dir: "auto" }, "\u2192 ", visible(cell.result || "(empty)")) : null,
    worths(known), scored(cell.scores), mixed(known, mean));
  if (mean !== null) node.style.setProperty("--depth", `${Math.round(8 + (34 * Math.abs(mean)) / most)}%`);
  return node;
}

// A turn without a call is malformed where a planner made it; an agent of one's own may just speak.
function decision({ action, action_input: input, said, format_error: fault }) {
  if (action === null) return [fault ? h("b", { class: "wrong" }, "malformed") : null, fault ? " " : null, h("code", {}, visible(said))];
  return [h("b", {}, visible(action)), " ", h("code", {}, visible(input))];
}

// Equal advantages are told once, with how often.
function worths(known) {
  const times = new Map();
  for (const one of known) times.set(signed(one, 2), [one, (times.get(signed(one, 2))?.[1] ?? 0) + 1]);
  return h("div", { class: "worths" }, [...times].sort(([, a], [, b]) => b[1] - a[1]).map(([said, [one, count]]) =>
    h("span", { class: one > 0 ? "plus" : one < 0 ? "minus" : "zero" }, one > 0 ? "\u25b2" : one < 0 ? "\u25bc" : "\u25a0", ` ${said}`, count > 1 ? h("span", { class: "soft" }, ` \u00d7 ${count}`) : null)));
}

function scored(scores) {
  const known = scores.filter((one) => one !== null);
  if (!known.length) return null;
  const mean = known.reduce((sum, one) => sum + one, 0) / known.length;
  return h("div", { class: "soft small" }, `step score ${number(mean, 2)}`);
}

function mixed(known, mean) {
  if (!known.some((one) => one > 0) || !known.some((one) => one < 0)) return null;
  return h("div", { class: "small" }, `The same move, credited by how each attempt ended: ${signed(mean, 2)} on average.`);
}
