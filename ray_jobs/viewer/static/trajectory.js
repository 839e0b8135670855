// One trajectory: its task, its siblings, its steps and why each got its advantage.

import { adjust, get, link } from "./api.js";
import { attemptName, h, isAnswer, longText, number, outcomeMark, outcomePill, outcomeWord, signed, verdictPill, visible } from "./dom.js";
import { versions, why } from "./groups.js";
import { drawSteps, stepsOf } from "./steps.js";
import { COLOURS, tokenLegend } from "./tokens.js";
import { phaseName } from "./trajectories.js";

export async function trajectory(app, { id, query }) {
  const run = app.run;
  const { record, siblings, attempts } = await get("trajectory", { run, id });
  const coloured = COLOURS.some(([name]) => name === query.get("colour"));
  let colour = coloured ? query.get("colour") : record.turns.some((turn) => turn.learner_logprobs) ? "drift" : "prob";
  let step = Number(query.get("step") ?? 0);
  const steps = h("div", { class: "steps" });
  const legend = h("div", {});
  const choice = h("select", { onchange: () => paint(choice.value) },
    COLOURS.map(([value, title]) => h("option", { value }, title)));

  function paint(next) {
    colour = next;
    choice.value = colour;
    steps.replaceChildren(...drawSteps(record, siblings, { colour }));
    legend.replaceChildren(tokenLegend(colour, record.turns));
    adjust({ colour, step: step || "" });
    mark(false);
  }

  function mark(scroll) {
    steps.querySelector(".current")?.classList.remove("current");
    const node = steps.children[step - 1];
    node?.classList.add("current");
    if (scroll && node) {
      node.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      node.focus({ preventScroll: true });
    }
  }

  const count = stepsOf(record).length;
  const back = record.phase === "train" ? link("group", record.group_id, { run }) : link("trajectories", "", { run, phase: record.phase });
  paint(colour);
  return {
    node: [
      h("p", { class: "crumbs" }, h("a", { href: link("trajectories", "", { run }) }, "Trajectories"), " / ",
        record.phase === "train" ? [h("a", { href: back }, record.group_id), " / ", visible(attemptName(id))] : phaseName(record.phase)),
      head(record, siblings), siblingRow(siblings, id, run), overview(record, (at) => { step = at; adjust({ step }); mark(true); }),
      h("div", { class: "colour-row" }, h("h2", {}, `${count} ${count === 1 ? "step" : "steps"}`), h("label", {}, "Tokens by ", choice), legend),
      steps, others(attempts, record, run)],
    shown: () => { if (step) mark(true); },
    move: (by) => { step = Math.min(count, Math.max(1, step + by)); adjust({ step }); mark(true); },
    turn: (by) => {
      const at = siblings.findIndex((row) => row.id === id);
      const next = siblings[at + by];
      if (at >= 0 && next) location.hash = link("t", next.id, { run, colour });
    },
    colour: () => paint(COLOURS[(COLOURS.findIndex(([name]) => name === colour) + 1) % COLOURS.length][0]),
    back,
  };
}

function head(record, siblings) {
  const facts = [
    ["phase", phaseName(record.phase)], ["step", record.step], ["ended", record.stop_reason], ["reward", record.reward],
    ["data set", record.dataset], ["tokens", record.num_tokens], ["versions", record.versions ? versions(record.versions) : null],
    ["trained into", record.trained_as === undefined ? null : `v${record.trained_as}`],
  ].filter(([, value]) => value !== null && value !== undefined);
  return h("section", { class: "card question" },
    h("h1", {}, longText(record.question, "text")),
    h("div", { class: "answer-row" }, outcomePill(record.outcome === undefined ? record.reward : record.outcome), verdictPill(record.verdict),
      h("span", {}, h("span", { class: "soft" }, "answer "), !isAnswer(record.answer) ? h("i", {}, "none") : longText(record.answer, "text inline")),
      h("span", {}, h("span", { class: "soft" }, "reference "), longText(record.gold, "text inline"))),
    h("dl", { class: "stats" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value)))),
    record.verdict && record.verdict !== "trained" ? h("p", {}, visible(why(record.verdict, siblings, record.reason, siblings.length))) : null,
    record.phase !== "train" ? h("p", { class: "soft" }, "Not trained on: its steps have no advantage.") : null);
}

function siblingRow(siblings, id, run) {
  if (siblings.length < 2) return null;
  return h("nav", { class: "sibling-row", "aria-label": "Attempts of the group" }, siblings.map((row) => h("a", {
    class: row.outcome === 1 ? "right" : row.outcome === null ? "none" : "wrong", href: link("t", row.id, { run }),
    "aria-current": row.id === id ? "page" : null, "aria-label": `attempt ${attemptName(row.id)}, ${outcomeWord(row.outcome)}`,
  }, attemptName(row.id), " ", outcomeMark(row.outcome))));
}

// The advantages of all steps at a glance; each leads to its step.
function overview(record, go) {
  if (!record.advantages?.length) return null;
  const most = Math.max(1e-9, ...record.advantages.map(Math.abs));
  return h("div", { class: "overview", role: "group", "aria-label": "Advantage of each step" }, h("span", { class: "soft small" }, "advantage of each step"), record.advantages.map((advantage, index) => {
    const fill = h("i", { class: advantage > 0 ? "plus" : advantage < 0 ? "minus" : "zero" });
    fill.style.setProperty("height", `${Math.max(3, (26 * Math.abs(advantage)) / most)}px`);
    return h("button", { type: "button", onclick: () => go(index + 1), "aria-label": `Step ${index + 1}: advantage ${signed(advantage)}` },
      h("span", { class: "up" }, advantage > 0 ? fill : null), h("span", { class: "down" }, advantage > 0 ? null : fill), h("span", { class: "name" }, `${index + 1}: ${signed(advantage, 2)}`));
  }));
}

function others(attempts, record, run) {
  const rest = attempts.filter((row) => row.group !== record.group_id || row.phase !== "train");
  if (!rest.length) return null;
  return h("section", {}, h("h2", {}, "Other attempts at this task"), h("ul", { class: "plain" }, rest.map((row) => h("li", {},
    h("a", { href: link("t", row.id, { run }) }, phaseName(row.phase), row.step ? `, step ${row.step}` : ""), " ", outcomePill(row.outcome), " ",
    row.phase !== record.phase ? h("a", { class: "soft", href: link("pair", "", { a: `${run}:${record.id}`, b: `${run}:${row.id}` }) }, "side by side") : null))));
}
