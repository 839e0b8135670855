// The sampled tokens of a turn, coloured by what is known of them.

import { h, signed, versionName, visible } from "./dom.js";

const FIRST = 1500;
export const COLOURS = [["drift", "log-prob drift"], ["version", "policy version"], ["prob", "probability"], ["none", "no colour"]];
const DRIFTS = [0.01, 0.05, 0.2, 0.5];
const PROBS = [0.99, 0.9, 0.5, 0.1];

function tokenVersions(turn) {
  const versions = turn.token_ids.map(() => turn.policy_version);
  for (const [index, version] of turn.switches ?? []) versions.fill(version, index);
  return versions;
}

// 0 to 4 by size; the sign says which side found the token likelier.
function driftClass(drift) {
  if (drift === null) return "untrained";
  const size = DRIFTS.filter((bound) => Math.abs(drift) >= bound).length;
  return size ? `${drift > 0 ? "up" : "down"}${size}` : "";
}

export function tokenStrip(turn, colour) {
  if (!turn.pieces?.length || !turn.logprobs?.length) return null;
  const versions = tokenVersions(turn);
  const learner = turn.learner_logprobs;
  const detail = h("output", { class: "token-detail" });
  const strip = h("div", { class: "tokens", dir: "ltr" });
  const classOf = (at) => ({
    drift: learner ? driftClass(learner[at] === null ? null : learner[at] - turn.logprobs[at]) : "",
    version: `v${((versions[at] % 6) + 6) % 6}`,
    prob: `p${PROBS.filter((bound) => Math.exp(turn.logprobs[at]) < bound).length}`,
    none: "",
  })[colour];
  const add = (from, to) => {
    for (let at = from; at < Math.min(to, turn.pieces.length); at += 1) {
      strip.append(h("span", { class: `tok ${classOf(at)}`, "data-at": at }, shown(turn.pieces[at])));
    }
  };
  const tell = (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) detail.textContent = described(turn, Number(at), versions[at]);
  };
  strip.addEventListener("pointerover", tell);
  strip.addEventListener("click", tell);
  add(0, FIRST);
  const more = turn.pieces.length > FIRST
    ? h("button", { type: "button", class: "more", onclick: () => { add(FIRST, Infinity); more.remove(); } }, `Show all ${turn.pieces.length.toLocaleString("en")} tokens`) : null;
  return h("div", {}, strip, more, detail);
}

function shown(piece) {
  return piece === "" ? "\u00b7" : visible(piece).replaceAll("\n", "\u23ce\n");
}

function described(turn, at, version) {
  const rollout = turn.logprobs[at];
  const learner = turn.learner_logprobs?.[at];
  const said = [`token ${at + 1} of ${turn.pieces.length}, id ${turn.token_ids[at]}, ${versionName(version)}`, `rollout ${signed(rollout, 4)}`];
  if (learner !== null && learner !== undefined) said.push(`learner ${signed(learner, 4)}`, `drift ${signed(learner - rollout, 4)}`);
  else if (turn.learner_logprobs) said.push("not trained: too old");
  return said.join(" \u00b7 ");
}

export function tokenLegend(colour, turns) {
  const box = (name, text) => h("span", {}, h("span", { class: `tok ${name}` }, "\u00a0\u00a0"), ` ${text}`);
  const known = turns.some((turn) => turn.learner_logprobs);
  const versions = [...new Set(turns.flatMap(tokenVersions))].sort((a, b) => a - b).slice(0, 12);
  const keys = {
    drift: known ? [box("down4", "learner \u2264 \u22120.5"), box("down2", "\u22120.05"), box("", "|drift| < 0.01"), box("up2", "+0.05"), box("up4", "\u2265 +0.5"), box("untrained", "not trained")]
      : [h("span", {}, "Drift is known only of tokens that the learner trained on.")],
    version: versions.map((version) => box(`v${((version % 6) + 6) % 6}`, versionName(version))),
    prob: [box("p0", "\u2265 99%"), box("p1", "\u2265 90%"), box("p2", "\u2265 50%"), box("p3", "\u2265 10%"), box("p4", "below")],
    none: [],
  }[colour];
  return h("div", { class: "legend" }, keys);
}
