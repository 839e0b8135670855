// Elements from values. Text only ever becomes text nodes: nothing that a model or a web page wrote is parsed.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

// Control characters, and marks that turn the direction of text or have no width, are written out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (one) => {
    const code = one.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

// Whether an attempt gave an answer; the same rule as is_answer in rollout/types.py.
export function isAnswer(text) {
  return Boolean(text?.trim());
}

const FIRST = 3000;

// A text of any length; what is beyond the first part comes when it is asked for.
export function longText(text, className = "text") {
  const whole = String(text ?? "");
  const box = h("div", { class: className, dir: "auto" }, visible(whole.slice(0, FIRST)));
  if (whole.length <= FIRST) return box;
  const more = h("button", { type: "button", class: "more", onclick: () => {
    box.textContent = visible(whole);
    more.remove();
  } }, `Show all ${whole.length.toLocaleString("en")} characters`);
  return h("div", {}, box, more);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "\u2013";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : digits);
}

// Three digits, as many as an eye takes in from a curve.
export function brief(value) {
  const size = Math.abs(value);
  return Number.isInteger(value) || size < 1 ? number(value) : number(Number(value.toPrecision(3)), size < 10 ? 2 : size < 100 ? 1 : 0);
}

// With its sign, for advantages: a real minus sign, as wide as the plus.
export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "\u2013";
  return (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(digits);
}

// A duration in the unit that people would say it in.
export function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 1e-3) return "under 1 ms";
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(value < 100 ? 1 : 0)} s`;
}

// The policy version that sampled; before version 0 there is only the model as it was downloaded.
export function versionName(version) {
  return version < 0 ? "untouched model" : `v${version}`;
}

export function percent(value) {
  return value === null || value === undefined ? "\u2013" : `${(100 * value).toFixed(1)}%`;
}

// Right and wrong by colour and by shape.
function outcomeIn(outcome) {
  return outcome === 1 ? ["right", "\u2713", "right"] : outcome === null || outcome === undefined ? ["none", "\u2013", "no score"] : ["wrong", "\u2717", "wrong"];
}

export function outcomeWord(outcome) {
  return outcomeIn(outcome)[2];
}

export function outcomePill(outcome) {
  const [kind, , said] = outcomeIn(outcome);
  return h("span", { class: `pill ${kind}` }, kind === "wrong" && outcome !== 0 ? number(outcome, 2) : said);
}

export function outcomeMark(outcome) {
  const [kind, sign, said] = outcomeIn(outcome);
  return h("span", { class: `mark-${kind}`, role: "img", "aria-label": said }, sign);
}

const VERDICTS = {
  trained: "trained", refused: "refused", all_right: "filtered: all right", all_wrong: "filtered: all wrong", overlong: "filtered: overlong", unscored: "filtered: unscored", failed: "failed",
  expired: "expired",
};

export function verdictName(verdict) {
  return VERDICTS[verdict] ?? verdict ?? "";
}

export function verdictPill(verdict) {
  return verdict ? h("span", { class: `pill v-${verdict in VERDICTS ? verdict : "other"}` }, verdictName(verdict)) : null;
}

// "0" for the attempt g000034/0, "guided 0" for g000034/guided/0.
export function attemptName(id) {
  return id.split("/").slice(1).join(" ") || id;
}
