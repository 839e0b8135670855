// Where a step's advantage came from, with the numbers filled in. The numbers were written by the run that trained.

import { h, number, signed } from "./dom.js";

const EPS = "1e-6";

export function creditPanel(record, index, siblings) {
  const advantage = record.advantages?.[index];
  if (advantage === undefined) return null;
  return h("aside", { class: "credit", "aria-label": `Advantage of step ${index + 1}` },
    h("div", { class: "credit-head" },
      h("div", {}, h("span", { class: `big ${kind(advantage)}` }, signed(advantage)), h("span", { class: "soft" }, " advantage")),
      score(record, index)),
    explanation(record, index, record.credit, siblings));
}

function kind(value) {
  return value > 0 ? "plus" : value < 0 ? "minus" : "zero";
}

function score(record, index) {
  const raw = record.prm_scores?.[index];
  return raw === null || raw === undefined ? null : h("div", {}, h("b", {}, number(raw)), h("span", { class: "soft" }, " step score"));
}

function explanation(record, index, { totals, scheme }, siblings) {
  if (record.reward === null) return [h("p", {}, record.outcome === null ? "This attempt could not be scored, so it trains nothing." : "This attempt was cut off by the token limit, and learner.overlong keeps it out of training.")];
  const advantage = record.advantages[index];
  const right = siblings.filter((row) => row.outcome === 1).length;
  const lines = [];
  const say = (text) => lines.push(h("p", {}, text));
  const formula = (...text) => lines.push(h("code", {}, ...text));
  const candidates = record.num_candidates?.[index] ?? 1;
  if (candidates > 1) say(`Guided: of ${candidates} samples of this decision, this one had the best step score.`);
  else if (record.num_candidates) say("Guided: the first sample of this decision was taken.");
  if (index > 0) say(`${signed(advantage)}, as at every step of this attempt; step 1 has the formula.`);
  else if (scheme === "process") say("No answer was compared; R is the lowest step score of the attempt, and 0 without an answer.");
  else if (["outcome", "outcome_centered", "outcome_guided"].includes(scheme)) say(`This attempt was ${record.outcome === 1 ? "right" : "not right"}; ${right} of ${siblings.length || totals.num} attempts were. Every step of the attempt shares this advantage.`);
  if (index === 0 && ["outcome_centered", "process"].includes(scheme)) {
    formula("R \u2212 mean = ", number(record.reward), " \u2212 ", number(totals.mean), " = ", h("b", {}, signed(advantage)));
  } else if (index === 0 && totals.std >= 1e-3) {
    formula("(R \u2212 mean) / (std + ", EPS, ") = (", number(record.reward), " \u2212 ", number(totals.mean), ") / ", number(totals.std), " = ", h("b", {}, signed(advantage)));
  }
  const same = record.same_steps?.[index] ?? [];
  if (same.length > 1) say(shared(same));
  return h("details", { open: true }, h("summary", {}, "Where it came from"), lines);
}

// Copies of one decision in one state, each with the advantage of its own attempt.
function shared(advantages) {
  const counts = new Map();
  for (const one of advantages) counts.set(signed(one, 2), (counts.get(signed(one, 2)) ?? 0) + 1);
  const each = [...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => `${value} \u00d7${count}`).join(", ");
  const mean = advantages.reduce((sum, one) => sum + one, 0) / advantages.length;
  return `${advantages.length} attempts made this very step in the same state: ${each}${counts.size > 1 ? `; mean ${signed(mean, 2)}. Each has the outcome of its own attempt; together they train the step.` : ""}`;
}
