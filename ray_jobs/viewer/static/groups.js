// Groups and what became of them: the list, and one group with its siblings.

import { adjust, get, link } from "./api.js";
import { h, longText, number, seconds, verdictName, verdictPill, versionName, visible } from "./dom.js";
import { filters, wanted } from "./filters.js";
import { VirtualList } from "./list.js";
import { matrix, matrixLegend, parting, partingLine } from "./matrix.js";

const CHOICES = ["trained", "refused", "all_right", "all_wrong", "overlong", "unscored", "all_right,all_wrong,overlong,unscored", "expired", "failed"];

export async function groups(app, { query }) {
  const run = app.run;
  const asked = wanted(query, ["text", "verdict", "step", "order"]);
  const list = new VirtualList({
    label: "Groups",
    heads: [["c-id", "group"], ["c-pill", "what became of it"], ["c-main", "task"], ["c-dots", "attempts"], ["c-step", "step"], ["c-more", "policy"]],
    empty: "No group matches.",
    fetchPage: (offset, limit, signal) => get("groups", { ...asked, run, offset, limit }, signal),
    href: (row) => link("group", row.id, { run }),
    draw: (row) => [
      h("span", { class: "c-id" }, row.id),
      h("span", { class: "c-pill" }, verdictPill(row.state)),
      h("span", { class: "c-main", dir: "auto" }, visible(row.question ?? row.reason ?? `${row.family ? `${row.family}, ` : ""}task number ${row.task_number}`)),
      h("span", { class: "c-dots" }, row.outcomes.length ? dots(row.outcomes) : row.scored ? `${number(row.right)} of ${number(row.scored)} right` : ""),
      h("span", { class: "c-step" }, row.step === null || row.step === undefined ? "" : `step ${row.step}`),
      h("span", { class: "c-more" }, row.versions ? versions(row.versions) : ""),
    ],
    onTotal: (total, error) => bar.count(total, error),
  });
  const states = app.states[run].groups;
  const choices = CHOICES.filter((one) => one.split(",").some((state) => states[state])).map((one) => [one, one.includes(",") ? "all filtered" : verdictName(one)]);
  const bar = filters(asked, {
    title: "Groups", search: "Search question, family, task, group, reason",
    selects: [["verdict", "Verdict", choices], ["order", "Order", [["newest", "newest first"]]]],
    changed: () => { adjust({ ...asked, run }); list.reset(); },
  });
  return {
    node: [h("h1", {}, "Groups"), h("p", { class: "soft lead" }, "A group is one task and all attempts at it. Groups without a difference between their attempts carry no gradient and are dropped; at most four of these are recorded per train step."), bar.node, list.node],
    move: (by) => list.move(by), close: () => list.close(), shown: () => bar.shown(query),
    update: (before) => { if (changed(app, before)) list.reset({ keep: app.states[run].generation === before[run].generation }); },
  };
}

export function changed(app, before) {
  const [now, then] = [app.states[app.run], before[app.run]];
  return now.trajectories !== then?.trajectories || now.num_groups !== then.num_groups || now.generation !== then.generation;
}

export function versions([low, high]) {
  return low === high ? versionName(low) : `${versionName(low)} to ${versionName(high)}`;
}

function dots(outcomes) {
  const right = outcomes.filter((one) => one === 1).length;
  return h("span", { class: "dots", role: "img", "aria-label": `${right} of ${outcomes.length} right` },
    outcomes.map((one) => h("i", { class: one === 1 ? "right" : one === null ? "none" : "wrong" })));
}

export function why(state, siblings, reason, size, scored) {
  const right = siblings.filter((row) => row.outcome === 1).length;
  const of = siblings.length || size || 0;
  const valid = siblings.length ? siblings.filter((row) => row.outcome !== null && row.outcome !== undefined).length : scored ?? of;
  const [counted, rest] = of > valid ? ["scored attempts", ` ${of - valid} more could not be scored.`] : ["attempts", ""];
  switch (state) {
    case "trained":
      return siblings.length
      ? `Trained: ${right} of ${of} attempts ${right === 1 ? "was" : "were"} right, so each can be compared with its siblings.` : "Trained: its attempts were not all right and not all wrong.";
    case "all_right": return `Filtered: all ${valid} ${counted} were right.${rest} With no difference between them every advantage is 0, so there is nothing to learn.`;
    case "all_wrong": return `Filtered: none of the ${valid} ${counted} was right.${rest} With no difference between them every advantage is 0, so there is nothing to learn.`;
    case "overlong": return `Filtered: ${right} of ${of} attempts were right, but learner.overlong leaves no difference to learn from: it takes attempts that were cut out of training, or lowers the reward of long ones.`;
    case "unscored": return `Filtered: ${valid} of ${of} attempts could be scored, and fewer than half are too few to compare. ${reason || ""}`;
    case "refused": return `Refused: the learner took no step on its batch, so it trained nothing. ${reason || ""}`;
    case "expired": return `Expired: ${reason || "its weights had become too old"} before a batch took it. Its task was drawn again as another group.`;
    case "failed": return `Failed: fewer than two attempts could be scored, also when tried again. ${reason || ""}`;
    default: return "";
  }
}

export async function group(app, { id }) {
  const run = app.run;
  const one = await get("group", { run, id });
  const { siblings } = one;
  const credit = siblings.length ? (await get("trajectory", { run, id: siblings[0].id })).record.credit : null;
  const parted = parting(one.tree, siblings);
  const picture = siblings.length ? matrix(one.tree, siblings, run, parted?.step) : null;
  let selected = -1;
  return {
    node: [
      h("p", { class: "crumbs" }, h("a", { href: link("groups", "", { run }) }, "Groups"), " / ", id),
      h("div", { class: "picture" },
        h("h1", {}, one.question ? longText(one.question, "text") : visible(id)), h("p", {}, verdictPill(one.state), " ", visible(why(one.state, siblings, one.reason, one.size, one.scored))),
        siblings.length ? h("h2", {}, `${siblings.length} attempts`) : h("p", { class: "card" }, "Its attempts are not in the run folder: of the groups that were not trained, at most four are recorded per train step."),
        ...(picture ? [partingLine(parted), matrixLegend(), picture] : [])),
      h("dl", { class: "stats" }, ...[
        ["family", one.family], ["task number", one.task_number], ["step", one.step], ["reference", one.gold], ["tries", one.num_tries], ["versions", one.versions ? versions(one.versions) : null],
        ["sampled tokens", one.tokens], ["duration", one.duration_s === null || one.duration_s === undefined ? null : seconds(one.duration_s)], ["mean reward", credit?.totals.mean], ["standard deviation of rewards", credit?.totals.std],
      ].filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value))))],
    move: (by) => {
      const links = [...(picture?.querySelectorAll("a.attempt") ?? [])];
      selected = Math.min(links.length - 1, Math.max(0, selected + by));
      links[selected]?.focus();
    },
    back: link("groups", "", { run }),
  };
}
