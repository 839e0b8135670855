// Two runs, or before and after, on the same tasks.

import { adjust, get, link } from "./api.js";
import { h, isAnswer, longText, number, outcomePill, visible } from "./dom.js";
import { filters, wanted } from "./filters.js";
import { VirtualList } from "./list.js";
import { drawSteps } from "./steps.js";
import { phaseName } from "./trajectories.js";

const KINDS = { gained: "gained", lost: "lost", both_wrong: "both wrong", both_right: "both right" };

function sides(app) {
  return app.runs.flatMap((about, run) => Object.keys(about.facets.phase).filter((phase) => phase.startsWith("eval_"))
    .map((phase) => [`${run}:${phase}`, `${app.runs.length > 1 ? `${about.name}, ` : ""}${phaseName(phase)}`]));
}

export async function compare(app, { query }) {
  const all = sides(app);
  if (all.length < 2) return { node: [h("h1", {}, "Compare"), h("p", { class: "card" }, "Nothing to compare yet: a run needs evaluations before and after training, or start the viewer with two runs.")] };
  const pick = (phase, run) => all.find(([value]) => value === `${run}:${phase}`)?.[0];
  const last = app.runs.length - 1;
  const asked = wanted(query, ["left", "right", "only", "text"]);
  asked.left ||= (last ? pick("eval_after", 0) : pick("eval_before", 0)) ?? all[0][0];
  asked.right ||= pick("eval_after", last) ?? all.at(-1)[0];
  const table = h("div", { class: "quad" });
  const list = new VirtualList({
    label: "Tasks",
    heads: [["c-pair", "outcome"], ["c-main", "task"], ["c-more", "answers (reference)"]],
    empty: "No task matches. Both sides must have attempted the same tasks.",
    fetchPage: async (offset, limit, signal) => {
      const answer = await get("pairs", { ...asked, offset, limit }, signal);
      table.replaceChildren(...quads(answer.counts, (only) => { asked.only = only; renew(); }, asked.only));
      return answer;
    },
    href: (row) => link("pair", "", { a: `${asked.left.split(":")[0]}:${row.left.id}`, b: `${asked.right.split(":")[0]}:${row.right.id}` }),
    draw: (row) => [
      h("span", { class: "c-pair" }, outcomePill(row.left.outcome), h("span", { "aria-label": "then" }, "\u2192"), outcomePill(row.right.outcome)),
      h("span", { class: "c-main", dir: "auto" }, visible(row.left.question ?? row.task)),
      h("span", { class: "c-more", dir: "auto" }, visible(`${row.left.answer ?? "none"} \u2192 ${row.right.answer ?? "none"} (${row.left.gold})`)),
    ],
    onTotal: (total, error) => bar.count(total, error),
  });
  const renew = () => { adjust(asked); list.reset(); };
  const bar = filters(asked, { title: "Compare", search: "Search question or task", selects: [], changed: renew });
  const side = (name, title) => h("label", {}, title, " ", h("select", { onchange: (event) => { asked[name] = event.target.value; renew(); } },
    all.map(([value, label]) => h("option", { value, selected: asked[name] === value }, label))));
  return {
    node: [h("h1", {}, "Compare"), h("div", { class: "sides" }, side("left", "From"), side("right", "to")), table, bar.node, list.node],
    move: (by) => list.move(by), close: () => list.close(), shown: () => bar.shown(query),
  };
}

function quads(counts, choose, only) {
  return Object.entries(KINDS).map(([kind, name]) => h("button", { type: "button", class: `quad-${kind}`, "aria-pressed": String(only === kind), onclick: () => choose(only === kind ? "" : kind) },
    h("b", {}, number(counts[kind] ?? 0)), " ", name));
}

export async function pair(app, { query }) {
  const both = await Promise.all(["a", "b"].map(async (name) => {
    const [run, ...id] = (query.get(name) ?? "").split(":");
    return { run: Number(run), ...(await get("trajectory", { run, id: id.join(":") })) };
  }));
  const question = both[0].record.question;
  return {
    node: [
      h("p", { class: "crumbs" }, h("a", { href: "#/compare" }, "Compare"), ` / ${visible(both[0].record.task_id)}`),
      h("h1", {}, longText(question, "text")), h("p", {}, h("span", { class: "soft" }, "reference "), longText(both[0].record.gold, "text inline")),
      both[0].record.task_id === both[1].record.task_id ? null : h("p", { class: "problem" }, "These are attempts at two different tasks."),
      h("div", { class: "pair" }, both.map(({ run, record, siblings }) => h("section", { "aria-label": phaseName(record.phase) },
        h("h2", {}, app.runs.length > 1 ? `${app.runs[run].name}: ` : "", h("a", { href: link("t", record.id, { run }) }, phaseName(record.phase))),
        h("p", {}, outcomePill(record.outcome === undefined ? record.reward : record.outcome), " answered ", !isAnswer(record.answer) ? h("i", {}, "nothing") : longText(record.answer, "text inline")),
        drawSteps(record, siblings, { bare: true }))))],
    back: "#/compare",
  };
}
