// The list of trajectories.

import { adjust, get, link } from "./api.js";
import { h, number, outcomePill, signed, verdictName, verdictPill, visible } from "./dom.js";
import { filters, wanted } from "./filters.js";
import { changed, versions } from "./groups.js";
import { VirtualList } from "./list.js";

const PHASES = { train: "training", eval_untouched: "evaluation, untouched", eval_before: "evaluation, before", eval_after: "evaluation, after" };

export function phaseName(phase) {
  return PHASES[phase] ?? phase;
}

export async function trajectories(app, { query }) {
  const run = app.run;
  const about = app.runs[run];
  const asked = wanted(query, ["text", "phase", "verdict", "outcome", "dataset", "step", "order"]);
  const list = new VirtualList({
    label: "Trajectories",
    empty: "No trajectory fits.",
    fetchPage: (offset, limit, signal) => get("trajectories", { ...asked, run, offset, limit }, signal),
    href: (row) => link("t", row.id, { run }),
    draw: (row) => [
      h("span", { class: "c-id" }, row.phase === "train" ? row.id : phaseName(row.phase)),
      h("span", { class: "c-pill" }, outcomePill(row.outcome), row.verdict && row.verdict !== "trained" ? verdictPill(row.verdict) : null),
      h("span", { class: "c-main", dir: "auto" }, visible(row.question)),
      h("span", { class: "c-dots" }, sparkline(row)),
      h("span", { class: "c-step" }, row.step === null || row.step === undefined ? "" : `step ${row.step}`),
      h("span", { class: "c-more" }, [row.turns ? `${number(row.turns)} turns` : "", row.versions ? versions(row.versions) : ""].filter(Boolean).join(", ")),
    ],
    onTotal: (total, error) => bar.count(total, error),
  });
  const of = (name, title = (one) => one) => Object.entries(about.facets[name]).map(([value, count]) => [value, `${title(value)} (${number(count)})`]);
  const bar = filters(asked, {
    title: "Trajectories", search: "Search question, answer, task, id",
    selects: [
      ["phase", "Phase", of("phase", phaseName)], ["verdict", "Verdict", of("verdict", verdictName)],
      ["outcome", "Outcome", [["right", "right"], ["wrong", "wrong"], ["unscored", "no score"]]],
      ["dataset", "Data set", of("dataset")], ["order", "Order", [["newest", "newest first"]]],
    ],
    changed: () => { adjust({ ...asked, run, search: "" }); list.reset(); },
  });
  return {
    node: [h("h1", {}, "Trajectories"), bar.node, list.node],
    move: (by) => list.move(by), close: () => list.close(), shown: () => bar.shown(query),
    update: (before) => { if (changed(app, before)) list.reset({ keep: app.states[run].generation === before[run].generation }); },
  };
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
