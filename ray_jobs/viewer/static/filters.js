// The row of filters above a list. What is chosen is in the address.

import { h, number } from "./dom.js";

export function wanted(query, names) {
  return Object.fromEntries(names.map((name) => [name, query.get(name) ?? ""]));
}

// `asked` is changed in place; `selects`: [[name, label, [[value, title]], {required}]]; a required one has no "any".
export function filters(asked, { title, search, selects, changed }) {
  const count = h("span", { class: "soft count", role: "status" });
  const text = h("input", { type: "search", "aria-label": search, placeholder: search, value: asked.text, maxlength: 200 });
  let timer;
  text.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { asked.text = text.value; changed(); }, 150);
  });
  const chosen = selects.map(([name, label, choices, { required = false } = {}]) => {
    const select = h("select", { "aria-label": label },
      required ? null : h("option", { value: "" }, `${label}: any`.replace("Order: any", "oldest first")),
      choices.map(([value, title_]) => h("option", { value, selected: asked[name] === value }, title_)));
    if (!choices.some(([value]) => value === asked[name]) && asked[name]) {
      select.append(h("option", { value: asked[name], selected: true }, asked[name]));
    }
    select.addEventListener("change", () => { asked[name] = select.value; changed(); });
    return select;
  });
  const step = "step" in asked ? h("input", { class: "narrow", type: "text", inputmode: "numeric", pattern: "[0-9]*", placeholder: "step", "aria-label": "Train step", value: asked.step }) : null;
  step?.addEventListener("input", () => {
    if (!/^\d{0,9}$/.test(step.value)) return;
    asked.step = step.value;
    changed();
  });
  return {
    node: h("form", { class: "filters", role: "search", "aria-label": title, onsubmit: (event) => event.preventDefault() }, text, chosen, step, count),
    count: (total, error) => { count.textContent = error ? error.message : `${number(total)} found`; },
    choose: (name, value) => { chosen[selects.findIndex((one) => one[0] === name)].value = value; },
    shown: (query) => { if (query.get("search")) text.focus(); },
  };
}
