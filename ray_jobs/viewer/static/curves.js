// Learning curves, and what the run is.

import { get, link } from "./api.js";
import { chart } from "./chart.js";
import { h, number, percent, verdictName } from "./dom.js";

const SOLVED = ["Tasks solved while sampling", "Line: share of sampled attempts that were right, scores in between as they are, before any filter. Diamonds: held-out tasks, answered greedily, with 95% intervals.", { "rollout/solve_rate": "while sampling" }, { share: true, tall: true }];
const FAMILIES = ["chain", "difference", "lookup", "three_lookup", "two_lookup"];
const byFamily = (metric) => Object.fromEntries(FAMILIES.map((family) => [`${metric}/${family}`, family]));
const SECTIONS = [
  ["Does it learn?", [
    ["Entropy", "Of the sampler per trained token, in nats, estimated by -log p. A fall to 0 means that nothing new is tried.", { "policy/entropy": "" }],
    ["Log-prob gap", "Mean |learner - rollout| over choice tokens, which one of them gave a probability below 99.9%: age and numerical difference together.", { "policy/logprob_gap_abs": "" }],
    ["Tokens per attempt", "Mean number of sampled tokens.", { "rollout/sampled_tokens": "" }],
    ["Errors per attempt", "Malformed replies, and tool calls that ended in an error.", { "rollout/format_errors": "malformed", "rollout/tool_errors": "tool errors" }],
    ["Attempts cut short", "Share of attempts with a reply that the token limit cut off, whose agent failed, or that have no score.", { "rollout/truncated_share": "cut off", "rollout/failed_share": "failed", "rollout/unscored_share": "unscored" }, { share: true }],
    ["Tokens without gradient", "Share of trained tokens outside the trust region.", { "policy/clip_high": "pushed up", "policy/clip_low": "pushed down" }],
    ["Groups with signal", "Share of groups in which outcomes differ; only they are trained.", { "util/kept_share": "" }, { share: true }],
    ["Groups", "What had become of the groups when the batch of the step was cut, before it was trained.", { "groups/trained": "trained", "groups/all_right": "all right", "groups/all_wrong": "all wrong", "groups/overlong": "overlong", "groups/unscored": "unscored" }],
    ["Solved, by family", "Share of sampled attempts that were right, over the last 8 tasks of each generated family.", byFamily("solved"), { share: true }],
    ["Steps per attempt", "Mean number of planner turns.", { "rollout/turns": "" }],
  ]],
  ["Can the process reward model be trusted?", [
    ["PRM score", "Mean score of the steps.", { "prm/score": "" }],
    ["Rescued groups", "Groups without a right attempt to which guided attempts brought one.", { "guided/rescued_share": "" }, { share: true }],
    ["Tokens of guided attempts", "Sampled since the step before, those of decisions that were not taken included.", { "guided/sampled_tokens": "" }],
  ]],
  ["Is the update sound?", [
    ["Age of the batch", "Train steps between sampling and training.", { "policy/age_mean": "mean", "policy/staleness_max": "oldest" }],
    ["Gradient norm", "Before it is clipped.", { "policy/grad_norm": "" }],
    ["Effective sample size", "Of the importance weights; 100% is on-policy.", { "policy/effective_sample_size": "" }, { share: true }],
  ]],
  ["Where does the time go?", [
    ["Seconds per step", "One pass of the loop, the learner's work in it, and its wait for rollouts.", { "time/step_s": "step", "learner/step_s": "learner", "learner/wait_s": "wait" }],
  ]],
];

const HELD_OUT_RATE = "held_out/solve_rate";

// All tasks of the evaluations while training, and each data set where there are several.
function heldOutPlot(rows) {
  const metrics = new Set(rows.flat().flatMap((row) => Object.keys(row)).filter((name) => name.startsWith(HELD_OUT_RATE)));
  const names = Object.fromEntries([...metrics].sort().map((metric) => [metric, metric.slice(HELD_OUT_RATE.length + 1) || (metrics.size > 1 ? "all" : "")]));
  return ["Held-out tasks solved while training", "Some of the held-out tasks, answered greedily, with 95% intervals. Diamonds: all of them, before and after RL.", names, { share: true, tall: true }];
}

export async function curves(app) {
  const node = h("div", { class: "curves" });
  let trends = [];
  const draw = async () => {
    const rows = await Promise.all(app.runs.map((_, run) => get("metrics", { run })));
    trends = rows.map(learning);
    const first = [heldOutPlot(rows), SOLVED].map((one) => plot(one, rows, app)).filter(Boolean);
    node.replaceChildren(h("h1", { class: "unseen" }, "Learning curves"), ...app.runs.map((about, run) => facts(about, app.states[run], run, trends[run])), ...first, ...SECTIONS.flatMap((one) => section(one, rows, app)));
  };
  await draw();
  return {
    node,
    update: async (before) => {
      const moved = app.states.some((state, run) => state.metrics !== before[run]?.metrics || state.generation !== before[run]?.generation);
      if (moved) await draw();
      else app.runs.forEach((about, run) => node.querySelector(`[data-run="${run}"]`)?.replaceWith(facts(about, app.states[run], run, trends[run])));
    },
  };
}

function section([title, plots], rows, app) {
  const cards = plots.map((one) => plot(one, rows, app)).filter(Boolean);
  return cards.length ? [h("h2", {}, title), h("div", { class: "plots" }, cards)] : [];
}

function plot([title, note, metrics, { share = false, tall = false } = {}], rows, app) {
  const several = Object.keys(metrics).length > 1;
  const twoRuns = app.runs.length > 1;
  const lines = rows.flatMap((of, run) => Object.entries(metrics).map(([metric, label], index) => ({
    name: [twoRuns ? app.runs[run].name : "", label].filter(Boolean).join(" "),
    kind: metric.startsWith("groups/") ? `v-${metric.slice(7)}` : `l${(several ? index : run) % 6}`,
    dashed: several && run > 0,
    points: pointsOf(of, metric),
  }))).filter((line) => line.points.length);
  const marks = tall ? app.runs.flatMap((about, run) => heldOut(about, twoRuns ? `${about.name} ` : "", twoRuns ? `l${run}` : "")) : [];
  return lines.length ? chart({ title, note, lines, marks, share, tall }) : null;
}

function pointsOf(rows, metric) {
  const evaluated = metric.startsWith(HELD_OUT_RATE);
  const ends = evaluated ? ["low", "high"].map((end) => metric.replace("solve_rate", end)) : [];
  return rows.filter((row) => row[metric] !== undefined && row[metric] !== null && (evaluated || "policy/loss" in row))
    .map((row) => [row.step, row[metric], ...ends.map((end) => row[end])]);
}

const HELD_OUT = { before: "held out, before RL", after: "held out, after RL" };

function heldOut({ held_out: found }, run, kind) {
  return found.map(({ kind: policy, step, rate, interval }) => ({ name: `${run}${HELD_OUT[policy]}`, kind: kind || policy, points: [[step, rate, ...interval]] }));
}

const WINDOW = 4;

// The sampled solve rate of the first steps against that of the last ones, and how it moved.
function learning(rows) {
  const rates = rows.map((row) => row["rollout/solve_rate"]).filter((rate) => rate !== undefined && rate !== null);
  if (rates.length < 2 * WINDOW) return "";
  const mean = (part) => part.reduce((sum, one) => sum + one, 0) / part.length;
  const [first, last] = [mean(rates.slice(0, WINDOW)), mean(rates.slice(-WINDOW))];
  const verdict = last > first + 0.05 ? "Learning" : last < first - 0.05 ? "Falling" : "Level";
  return `${verdict}: ${percent(first)} of the sampled attempts right in the first ${WINDOW} steps, ${percent(last)} in the last ${WINDOW}.`;
}

function facts(about, state, run, trend) {
  const { solved, settings } = about;
  const total = Object.values(state.groups).reduce((sum, one) => sum + one, 0);
  const both = solved.before !== null && solved.after !== null && solved.before !== undefined && solved.after !== undefined;
  const progress = `${state.steps ?? 0}${settings.num_steps ? ` of ${settings.num_steps}` : ""}`;
  return h("section", { class: "card facts", "data-run": run },
    h("div", { class: "facts-head" }, h("h2", {}, about.name), h("span", { class: "soft" }, said(settings))),
    both ? h("p", { class: "hero-row" }, h("a", { class: "hero", href: link("compare") }, `${percent(solved.before)} \u2192 ${percent(solved.after)}`),
      h("span", {}, ` of ${about.num_eval_tasks ? `${number(about.num_eval_tasks)} ` : ""}held-out tasks solved, before and after RL`)) : null,
    about.verdict ? h("p", { class: "verdict" }, about.verdict) : null,
    trend ? h("p", { class: "verdict" }, trend) : null,
    h("div", { class: "tiles" },
      tile(progress, "train steps"),
      tile(number(state.trajectories), "trajectories recorded", link("trajectories", "", { run, phase: "any" })),
      ...(total ? [tile(number(total), "groups that ended", link("groups", "", { run }))] : []),
      ...(solved.untouched === null || solved.untouched === undefined ? [] : [tile(percent(solved.untouched), "solved by the untouched model", link("trajectories", "", { run, phase: "eval_untouched" }))])),
    total ? bar(state, total, run) : null,
    about.bottleneck ? h("p", { class: "soft" }, `Speed: ${about.bottleneck}.`) : null,
    about.report ? h("p", { class: "soft" }, "Report of this run: ", h("code", {}, about.report)) : null);
}

// The settings in words.
function said({ model, objective, credit, seed, pipeline_depth: ahead, max_staleness: oldest }) {
  return [
    model ? `model ${model}` : "model unknown", objective ? `objective ${objective}` : "", credit ? `credit ${credit}` : "", seed === null || seed === undefined ? "" : `seed ${seed}`,
    ahead === null || ahead === undefined ? "" : ahead === 0 ? "synchronous" : `rollouts up to ${ahead} ${ahead === 1 ? "batch" : "batches"} ahead`,
    oldest === null || oldest === undefined ? "" : `tokens trained up to ${oldest} steps old`,
  ].filter(Boolean).join(" \u00b7 ");
}

function tile(value, name, href) {
  const inside = [h("b", {}, value), h("span", {}, name)];
  return href ? h("a", { class: "tile", href }, inside) : h("div", { class: "tile" }, inside);
}

const ORDER = ["trained", "refused", "all_right", "all_wrong", "overlong", "unscored", "expired", "failed"];

function bar({ groups }, total, run) {
  const there = ORDER.filter((state) => groups[state]);
  const strip = h("div", { class: "strip", role: "img", "aria-label": there.map((state) => `${groups[state]} ${verdictName(state)}`).join(", ") },
    there.map((state) => {
      const part = h("span", { class: `part v-${state}` });
      part.style.setProperty("flex-grow", groups[state] / total);
      return part;
    }));
  return h("div", {}, strip, h("div", { class: "legend" }, there.map((state) =>
    h("a", { href: link("groups", "", { run, verdict: state }) }, h("i", { class: `key-box v-${state}` }), `${number(groups[state])} ${verdictName(state)}`))));
}
