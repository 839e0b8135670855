// A trajectory as its steps: what the planner decided, what the executor's tool gave, what verifier and generator said.

import { creditPanel } from "./credit.js";
import { h, longText, number, seconds, versionName, visible } from "./dom.js";
import { tokenStrip } from "./tokens.js";

// The turns after a planner's belong to its step, up to the next planner turn.
export function stepsOf(record) {
  const steps = [];
  for (const turn of record.turns) {
    if (turn.role === "planner" || !steps.length) steps.push({ planner: turn.role === "planner" ? turn : null, others: turn.role === "planner" ? [] : [turn] });
    else steps.at(-1).others.push(turn);
  }
  return steps;
}

export function drawSteps(record, siblings, { colour = "none", bare = false } = {}) {
  return stepsOf(record).map((step, index) => h("article", { class: "step", id: `step-${index + 1}`, tabindex: "-1", "aria-label": `Step ${index + 1}` },
    h("div", { class: "step-body" }, h("h3", {}, `Step ${index + 1}`),
      step.planner ? planner(step.planner, colour, bare) : null, step.planner ? executor(step.planner) : null,
      step.others.map((turn) => other(turn, colour, bare))),
    bare && !record.credit ? null : creditPanel(record, index, siblings)));
}

function role(name, title, ...content) {
  return h("section", { class: `role ${name}` }, h("h4", {}, title), content);
}

function field(name, text, mono = false) {
  return h("div", { class: "field" }, h("span", { class: "soft" }, name), longText(text, mono ? "text mono" : "text"));
}

function planner(turn, colour, bare) {
  const decision = turn.action === null
    ? [turn.format_error ? h("p", { class: "wrong" }, `Malformed: ${visible(turn.format_error)}`) : null, field("said", turn.text, true)]
    : [turn.thought ? field("thought", turn.thought) : null, h("div", { class: "field" }, h("span", { class: "soft" }, "action"), h("b", { class: "action" }, visible(turn.action))), field("input", turn.action_input, true)];
  const strip = bare ? null : tokenStrip(turn, colour);
  return role("planner", "Planner", decision,
    bare ? null : h("p", { class: "soft small" }, [`${number(turn.token_ids?.length ?? 0)} tokens`, turn.policy_version === undefined ? "" : `${versionName(turn.policy_version)}${turn.switches?.length ? ` to ${versionName(turn.switches.at(-1)[1])}` : ""}`,
      turn.finish_reason === "length" ? "cut by the token limit" : "", turn.generate_s ? seconds(turn.generate_s) : ""].filter(Boolean).join(" \u00b7 ")),
    strip ? h("details", { open: true, class: "token-box" }, h("summary", {}, "Tokens"), strip) : null,
    !bare && turn.prompt_text ? h("details", {}, h("summary", {}, "What it was shown"), longText(turn.prompt_text, "text mono")) : null);
}

function executor(turn) {
  if (turn.action === null || turn.result === null) return null;
  return role("executor", `Executor: ${visible(turn.action)}`,
    turn.tool_error ? h("p", { class: "wrong" }, `failed: ${visible(turn.tool_error)}`) : null,
    longText(turn.result === "" ? "(empty)" : turn.result, "text mono"),
    h("p", { class: "soft small" }, [turn.tool_s ? seconds(turn.tool_s) : "", turn.foreign ? "from outside this machine" : ""].filter(Boolean).join(" \u00b7 ")));
}

function other(turn, colour, bare) {
  const title = turn.role === "verifier" ? "Verifier" : turn.role === "generator" ? "Generator" : turn.role;
  const strip = bare ? null : tokenStrip(turn, colour === "drift" ? "none" : colour);
  return role(turn.role === "verifier" ? "verifier" : "generator", title, longText(turn.text, "text"),
    strip ? h("details", {}, h("summary", {}, "Tokens"), strip) : null);
}
