// Where a step's advantage came from, with the numbers filled in. The parts were written by the run that trained.

import { h, number, signed } from "./dom.js";

const EPS = "1e-6";

export function creditPanel(record, index, siblings) {
  const advantage = record.advantages?.[index];
  if (advantage === undefined) return null;
  const credit = record.credit;
  return h("aside", { class: "credit", "aria-label": `Advantage of step ${index + 1}` },
    h("div", { class: "credit-head" },
      h("div", {}, h("span", { class: `big ${kind(advantage)}` }, signed(advantage)), h("span", { class: "soft" }, " advantage")),
      isScored(credit) ? score(record, index) : null),
    meter(record, index), explanation(record, index, credit, siblings));
}

function kind(value) {
  return value > 0 ? "plus" : value < 0 ? "minus" : "zero";
}

// Where outcomes alone were credited, a part that is always zero says nothing.
function hasProcess(credit) {
  return credit.scheme === "outcome_gated";
}

function isScored(credit) {
  return ["outcome_gated", "process"].includes(credit.scheme);
}

function score(record, index) {
  const raw = record.prm_scores?.[index];
  return raw === null || raw === undefined ? h("div", { class: "soft" }, "no PRM score") : h("div", {}, h("b", {}, number(raw)), h("span", { class: "soft" }, " PRM score"));
}

// Both parts on one axis, zero in the middle.
function meter(record, index) {
  const parts = [["outcome", record.outcome_parts[index]]];
  if (hasProcess(record.credit)) parts.push(["process", record.process_parts[index]]);
  const most = Math.max(1e-9, ...record.outcome_parts.map((one, at) => Math.max(Math.abs(one), Math.abs(record.process_parts[at]))));
  return h("div", { class: "meter" }, parts.map(([name, value]) => {
    const fill = h("i", { class: kind(value) });
    const share = (50 * Math.abs(value)) / most;
    fill.style.setProperty("width", `${share}%`);
    fill.style.setProperty("left", `${value < 0 ? 50 - share : 50}%`);
    return h("div", { class: "meter-row" }, h("span", {}, name), h("span", { class: "track" }, fill), h("b", {}, signed(value)));
  }));
}

function explanation(record, index, credit, siblings) {
  const { totals, scheme, weight } = credit;
  if (record.reward === null) return [h("p", {}, record.outcome === null ? "This attempt could not be scored, so it trains nothing." : "This attempt was cut off by the token limit, and learner.overlong keeps it out of training.")];
  const [outcome, process] = [record.outcome_parts[index], record.process_parts[index]];
  const right = siblings.filter((row) => row.outcome === 1).length;
  const lines = [];
  const say = (text) => lines.push(h("p", {}, text));
  const formula = (...text) => lines.push(h("code", {}, ...text));
  if (["outcome", "outcome_centered", "outcome_gated", "process"].includes(scheme)) {
    if (index > 0) say(`Outcome: ${signed(outcome)}, as at every step of this attempt; step 1 has the formula.`);
    else if (scheme === "process") say("Outcome: no answer was compared; R is the lowest step score of the attempt, and 0 without an answer.");
    else say(`Outcome: this attempt was ${record.outcome === 1 ? "right" : "not right"}; ${right} of ${siblings.length || totals.num} attempts were. Every step of the attempt shares this part.`);
    if (index === 0 && ["outcome_centered", "process"].includes(scheme)) {
      formula("R \u2212 mean = ", number(record.reward), " \u2212 ", number(totals.mean), " = ", h("b", {}, signed(outcome)));
    } else if (index === 0 && totals.std >= 1e-3) {
      formula("(R \u2212 mean) / (std + ", EPS, ") = (", number(record.reward), " \u2212 ", number(totals.mean), ") / ", number(totals.std), " = ", h("b", {}, signed(outcome)));
    }
  }
  const mapped = record.step_rewards[index];
  if (scheme === "outcome_gated") {
    const mean = record.state_means[index];
    if (mapped === null) say("Process: this step has no score, so this part is 0.");
    else if (Math.abs(mapped - mean) < 1e-9) say("Process: no sibling decided otherwise in this state, or all decisions score the same, so this part is 0.");
    else {
      say(`Process: this step scored ${side(mapped, mean)} the mean ${number(mean)} of the decisions that siblings made in the same state.`);
      formula("s = ", mappedFrom(record, index, mapped));
      formula("w D(s \u2212 mean) = ", number(weight), " \u00d7 D(", signed(mapped - mean), ") = ", h("b", {}, signed(process)));
      say("D divides by the root mean square of these differences in the group, and clips at 2.");
    }
    formula(signed(outcome), " ", signed(process), " = ", h("b", {}, signed(record.advantages[index])));
    if (weight === 0) say("The weight w is 0 here: step scores of this family have not been shown to order decisions like the outcomes (metrics prm/order).");
  } else if (["outcome", "outcome_centered"].includes(scheme)) {
    say("Process: none; no step of this group was scored, or the recipe credits outcomes alone.");
  }
  const same = record.same_steps?.[index] ?? [];
  if (same.length > 1) say(shared(same));
  return h("details", { open: true }, h("summary", {}, "Where it came from"), lines);
}

function side(value, mean) {
  return value > mean ? "above" : value < mean ? "below" : "at";
}

// Copies of one decision in one state, each with the advantage of its own attempt.
function shared(advantages) {
  const counts = new Map();
  for (const one of advantages) counts.set(signed(one, 2), (counts.get(signed(one, 2)) ?? 0) + 1);
  const each = [...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => `${value} \u00d7${count}`).join(", ");
  const mean = advantages.reduce((sum, one) => sum + one, 0) / advantages.length;
  return `${advantages.length} attempts made this very step in the same state: ${each}${counts.size > 1 ? `; mean ${signed(mean, 2)}. Each has the outcome of its own attempt; together they train the step.` : ""}`;
}

function mappedFrom(record, index, mapped) {
  const raw = record.prm_scores?.[index];
  if (mapped === 0) return "0, because the decision was malformed";
  return `0.05 + 0.95 \u00d7 ${number(raw)} = ${number(mapped)}`;
}
