// Learning curves, and what the run is.

import { get, link } from "./api.js";
import { chart } from "./chart.js";
import { h, number, percent, verdictName } from "./dom.js";

const SECTIONS = [
  ["Does it learn?", [
    ["Solved while sampling", "Share of all sampled attempts that were right, before any filter.", { "rollout/solve_rate": "" }, 1],
    ["PRM score", "Mean score of the steps, in groups with signal.", { "prm/score": "" }, 1],
    ["Weight of the PRM", "Alarms lower it, quiet steps bring it back.", { "prm/weight": "" }],
  ]],
  ["Is there something to learn from?", [
    ["Groups with signal", "Share of groups in which outcomes differ; only they are trained.", { "rollout/groups_kept_share": "" }, 1],
    ["Groups by now", "Where the groups drawn so far went.", { "groups/trained": "trained", "groups/all_right": "all right", "groups/all_wrong": "all wrong", "groups/overlong": "overlong" }],
    ["Steps of an attempt", "Mean number of planner turns.", { "rollout/turns": "" }],
  ]],
  ["Is the update sound?", [
    ["Log-prob gap", "Mean |learner - rollout| over trained tokens: age and numerical difference together.", { "policy/logprob_gap_abs": "" }],
    ["Age of the batch", "Train steps between sampling and training.", { "policy/age_mean": "mean", "policy/staleness_max": "oldest" }],
    ["Gradient norm", "Before it is clipped.", { "policy/grad_norm": "" }],
    ["Effective sample size", "Of the importance weights; 1 is on-policy.", { "policy/effective_sample_size": "" }, 1],
  ]],
  ["Where does the time go?", [
    ["Seconds per step", "Whole turn of the loop, the learner's work in it, and its waiting.", { "time/step_s": "step", "learner/step_s": "learner", "learner/wait_s": "wait" }],
    ["Tokens of an attempt", "Mean sampled tokens.", { "rollout/sampled_tokens": "" }],
  ]],
];

export async function curves(app) {
  const node = h("div", { class: "curves" });
  const draw = async () => {
    const rows = await Promise.all(app.runs.map((_, run) => get("metrics", { run })));
    node.replaceChildren(h("h1", { class: "unseen" }, "Learning curves"), ...app.runs.map((about, run) => facts(about, app.states[run], run)), ...SECTIONS.flatMap((one) => section(one, rows, app.runs)));
  };
  await draw();
  return {
    node,
    update: async (before) => {
      const moved = app.states.some((state, run) => state.metrics !== before[run]?.metrics || state.generation !== before[run]?.generation);
      if (moved) await draw();
      else app.runs.forEach((about, run) => node.querySelector(`[data-run="${run}"]`)?.replaceWith(facts(about, app.states[run], run)));
    },
  };
}

function section([title, plots], rows, runs) {
  const cards = plots.map(([name, note, metrics, top]) => {
    const lines = rows.flatMap((of, run) => Object.entries(metrics).map(([metric, label], index) => ({
      name: [runs.length > 1 ? runs[run].name : "", label].filter(Boolean).join(" "),
      kind: `l${runs.length > 1 ? run + 2 * index : index}`,
      points: of.filter((row) => row[metric] !== undefined && row[metric] !== null && "policy/loss" in row).map((row) => [row.step, row[metric]]),
    }))).filter((line) => line.points.length);
    return lines.length ? chart({ title: name, note, lines, top: top ?? null }) : null;
  }).filter(Boolean);
  return cards.length ? [h("h2", {}, title), h("div", { class: "plots" }, cards)] : [];
}

function facts(about, state, run) {
  const { solved, settings } = about;
  const total = Object.values(state.groups).reduce((sum, one) => sum + one, 0);
  const rates = [["untouched", solved.untouched], ["cold-started", solved.before], ["after RL", solved.after]].filter(([, rate]) => rate !== null && rate !== undefined);
  return h("section", { class: "card facts", "data-run": run },
    h("div", { class: "facts-head" }, h("h2", {}, about.name), h("span", { class: "soft" },
      `${settings.model ?? "model unknown"} \u00b7 ${settings.objective ?? ""} \u00b7 credit ${settings.credit ?? "\u2013"} \u00b7 seed ${settings.seed ?? "\u2013"} \u00b7 D ${settings.pipeline_depth ?? "\u2013"}, S ${settings.max_staleness ?? "\u2013"}`)),
    h("div", { class: "tiles" },
      ...rates.map(([name, rate]) => tile(percent(rate), `solved, ${name}`, link("compare"))),
      tile(`${state.steps ?? 0}${settings.num_steps ? ` of ${settings.num_steps}` : ""}`, "train steps"),
      tile(number(state.trajectories), "trajectories recorded", link("trajectories", "", { run })),
      ...(total ? [tile(number(total), "groups drawn", link("groups", "", { run }))] : [])),
    total ? bar(state, total, run) : null,
    about.verdict ? h("p", { class: "verdict" }, about.verdict) : null,
    about.bottleneck ? h("p", { class: "soft" }, `Speed: ${about.bottleneck}.`) : null,
    about.alarms.length ? h("details", {}, h("summary", {}, `${about.alarms.length} ${about.alarms.length === 1 ? "alarm" : "alarms"} about the PRM`),
      h("ul", {}, about.alarms.map((alarm) => h("li", {}, `Step ${alarm.step}: ${alarm.message}; weight ${number(alarm.prm_weight)}`)))) : null);
}

function tile(value, name, href) {
  const inside = [h("b", {}, value), h("span", {}, name)];
  return href ? h("a", { class: "tile", href }, inside) : h("div", { class: "tile" }, inside);
}

const ORDER = ["trained", "refused", "all_right", "all_wrong", "overlong", "expired", "failed", "in_batch", "ready", "running", "queued"];

const ENDED = new Set(["trained", "refused", "all_right", "all_wrong", "overlong", "expired", "failed"]);

function bar({ groups, live }, total, run) {
  const name = (state) => (live || ENDED.has(state) ? "" : "were ") + verdictName(state);
  const there = ORDER.filter((state) => groups[state]);
  const strip = h("div", { class: "strip", role: "img", "aria-label": there.map((state) => `${groups[state]} ${name(state)}`).join(", ") },
    there.map((state) => {
      const part = h("span", { class: `part v-${state}` });
      part.style.setProperty("flex-grow", groups[state] / total);
      return part;
    }));
  return h("div", {}, strip, h("div", { class: "legend" }, there.map((state) =>
    h("a", { href: link("groups", "", { run, verdict: state }) }, h("i", { class: `key-box v-${state}` }), `${number(groups[state])} ${name(state)}`))));
}
