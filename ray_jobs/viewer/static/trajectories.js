// The list of trajectories. It opens on what RL changed, where that is known.

import { adjust, get, link } from "./api.js";
import { h, isAnswer, number, outcomeMark, outcomePill, signed, verdictName, verdictPill, visible } from "./dom.js";
import { filters, wanted } from "./filters.js";
import { changed, versions } from "./groups.js";
import { VirtualList } from "./list.js";

const PHASES = { train: "training", held_out: "held out, while training", eval_untouched: "untouched model", eval_before: "before RL", eval_after: "after RL" };
const CHANGED = "changed";

export function phaseName(phase) {
  return PHASES[phase] ?? phase;
}

export async function trajectories(app, { query }) {
  const run = app.run;
  const about = app.runs[run];
  const asked = wanted(query, ["text", "phase", "verdict", "outcome", "dataset", "step", "order"]);
  const turned = about.facets.changed;
  // Any filter in the address is meant as it stands.
  let opened = !asked.phase;
  asked.phase ||= turned && !["text", "verdict", "outcome", "dataset", "step", "search"].some((name) => query.get(name)) ? CHANGED : "any";
  const list = new VirtualList({
    label: "Trajectories",
    heads: [["c-id", "policy or attempt"], ["c-pill", "outcome"], ["c-main", "task"], ["c-answer", "answer (reference)"], ["c-dots", "advantages"], ["c-more", "step, length, policy"]],
    empty: "No trajectory matches.",
    fetchPage: (offset, limit, signal) => get("trajectories", { ...asked, run, offset, limit }, signal),
    href: (row) => (row.before === undefined ? link("t", row.id, { run }) : link("pair", "", { a: `${run}:${row.before.id}`, b: `${run}:${row.id}` })),
    draw: (row) => [
      h("span", { class: "c-id" }, row.phase === "train" ? row.id : h("span", { class: `pill ${row.phase}` }, phaseName(row.phase))),
      h("span", { class: "c-pill" }, row.before === undefined ? outcomePill(row.outcome) : h("span", { class: `pill ${row.outcome === 1 ? "right" : "wrong"}` }, row.outcome === 1 ? "gained" : "lost"),
        row.verdict && row.verdict !== "trained" ? verdictPill(row.verdict) : null),
      h("span", { class: "c-main", dir: "auto" }, visible(row.question)),
      h("span", { class: "c-answer", dir: "auto" }, row.before === undefined ? answer(row) : [answer(row.before, false), h("span", { "aria-label": "then" }, " \u2192 "), answer(row, false)]),
      h("span", { class: "c-dots" }, sparkline(row)),
      h("span", { class: "c-more" }, [row.step === null || row.step === undefined ? "" : `step ${row.step}`, row.turns ? `${number(row.turns)} ${row.turns === 1 ? "turn" : "turns"}` : "", row.phase === "train" && row.versions ? versions(row.versions) : ""].filter(Boolean).join(", ")),
    ],
    onTotal: (total, error) => bar.count(total, error),
  });
  const of = (name, title = (one) => one) => Object.entries(about.facets[name]).map(([value, count]) => [value, `${title(value)} (${number(count)})`]);
  const bar = filters(asked, {
    title: "Trajectories", search: "Search question, answer, task, id",
    selects: [
      ["phase", "Phase", [...(turned ? [[CHANGED, `what RL changed (${number(turned)})`]] : []), ["any", "all attempts"], ...of("phase", phaseName)], { required: true }],
      ["verdict", "Verdict", of("verdict", verdictName)],
      ["outcome", "Outcome", [["right", "right"], ["wrong", "wrong"], ["unscored", "no score"]]],
      ["dataset", "Data set", of("dataset")], ["order", "Order", [["newest", "newest first"]]],
    ],
    changed: () => {
      // A search means all attempts, unless the reader has chosen which.
      if (asked.text && opened) bar.choose("phase", asked.phase = "any");
      opened = false;
      adjust({ ...asked, run, search: "" });
      list.reset();
    },
  });
  return {
    node: [h("h1", {}, "Trajectories"), bar.node, list.node],
    move: (by) => list.move(by), close: () => list.close(), shown: () => bar.shown(query),
    update: (before) => { if (changed(app, before)) list.reset({ keep: app.states[run].generation === before[run].generation }); },
  };
}

function answer(row, reference = true) {
  const said = !isAnswer(row.answer) ? h("i", {}, "none") : visible(row.answer);
  return [outcomeMark(row.outcome), " ", said, row.outcome === 1 || !reference ? "" : h("span", { class: "soft" }, ` (${visible(row.gold)})`)];
}

function sparkline(row) {
  if (!row.advantages) return "";
  const said = row.advantages.map((one) => signed(one, 2)).join(", ");
  return h("span", { class: "spark", role: "img", "aria-label": `advantages ${said}` }, row.advantages.slice(0, 12).map((one) => {
    const part = h("i", { class: one > 0 ? "plus" : one < 0 ? "minus" : "zero" });
    part.style.setProperty("height", `${Math.max(2, Math.min(9, 5 * Math.abs(one)))}px`);
    return part;
  }));
}
