// The frame: which view is shown, what keys do, and news from the run every so often.

import { get, link, place } from "./api.js";
import { h } from "./dom.js";
import { curves } from "./curves.js";
import { group, groups } from "./groups.js";
import { trajectories } from "./trajectories.js";
import { trajectory } from "./trajectory.js";
import { compare, pair } from "./compare.js";

const NEWS_MS = 1500;
const TABS = [["curves", "Curves"], ["groups", "Groups"], ["trajectories", "Trajectories"], ["compare", "Compare"]];
const VIEWS = { curves, groups, group, trajectories, t: trajectory, compare, pair };
const TAB_OF = { group: "groups", t: "trajectories", pair: "compare" };

const main = document.getElementById("main");
const app = { runs: [], states: [], run: 0 };
let shown = null;
let turn = 0;

async function show() {
  const here = place();
  const asked = Number(here.query.get("run") ?? 0);
  app.run = asked < app.runs.length ? asked : 0;
  frame(TAB_OF[here.view] ?? here.view);
  shown?.close?.();
  const mine = ++turn;
  try {
    const next = await (VIEWS[here.view] ?? curves)(app, here);
    if (mine !== turn) return next.close?.();
    shown = next;
    main.replaceChildren(...[next.node].flat().filter(Boolean));
    next.shown?.();
  } catch (error) {
    if (mine !== turn) return undefined;
    shown = null;
    main.replaceChildren(h("p", { class: "card problem", role: "alert" }, error.message), h("p", {}, h("a", { href: "#/" }, "Back to the curves")));
  }
  return undefined;
}

function frame(view) {
  const about = app.runs[app.run];
  document.title = `${about.name}: ${TABS.find(([one]) => one === view)?.[1] ?? "viewer"}`;
  document.getElementById("run-name").textContent = app.runs.length > 1 ? app.runs.map((run) => run.name).join(" | ") : about.name;
  document.getElementById("tabs").replaceChildren(...TABS.map(([name, title]) =>
    h("a", { href: link(name, "", { run: app.run }), "aria-current": name === view ? "page" : null }, title)));
  document.getElementById("run-choice").hidden = app.runs.length < 2 || view === "compare";
  document.getElementById("run-select").value = String(app.run);
  status();
}

function status() {
  const state = app.states[app.run];
  const rows = `${state.trajectories.toLocaleString("en")} trajectories`;
  const broken = state.unreadable ? `, ${state.unreadable} unreadable lines` : "";
  const node = document.getElementById("status");
  node.classList.toggle("live", state.live);
  const said = `${state.live ? "live, " : ""}${rows}${broken}`;
  if (node.textContent !== said) node.textContent = said;
}

async function news() {
  try {
    const states = await get("state");
    const before = app.states;
    app.states = states;
    document.body.classList.remove("lost");
    if (JSON.stringify(states) !== JSON.stringify(before)) {
      app.runs = await get("about");
      status();
      await shown?.update?.(before);
    }
  } catch (error) {
    document.body.classList.add("lost");
    // Only an answer of the server is an error with a sentence; a failed request is a TypeError.
    document.getElementById("status").textContent = error instanceof TypeError ? "the server is gone; start agentflow view again" : error.message;
  }
  setTimeout(news, document.hidden ? 4 * NEWS_MS : NEWS_MS);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}

const help = document.getElementById("help");

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    if (help.open) return;
    if (typing) event.target.blur();
    else if (shown?.back) location.hash = shown.back;
    return;
  }
  if (typing || help.open) return;
  const does = {
    "?": () => help.showModal(),
    "/": () => (main.querySelector("input[type=search]") ?? goSearch()).focus(),
    t: switchTheme,
    j: () => shown?.move?.(1),
    k: () => shown?.move?.(-1),
    "[": () => shown?.turn?.(-1),
    "]": () => shown?.turn?.(1),
    c: () => shown?.colour?.(),
    ...Object.fromEntries(TABS.map(([name], index) => [String(index + 1), () => { location.hash = link(name, "", { run: app.run }); }])),
  }[event.key];
  if (does) {
    event.preventDefault();
    does();
  }
}

function goSearch() {
  location.hash = link("trajectories", "", { run: app.run, search: 1 });
  return main;
}

async function start() {
  [app.runs, app.states] = await Promise.all([get("about"), get("state")]);
  const select = document.getElementById("run-select");
  select.replaceChildren(...app.runs.map((run, index) => h("option", { value: index }, run.name)));
  select.addEventListener("change", () => {
    const { view } = place();
    location.hash = link(TAB_OF[view] ?? view, "", { run: select.value });
  });
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help-button").addEventListener("click", () => help.showModal());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  addEventListener("hashchange", show);
  addEventListener("keydown", key);
  await show();
  setTimeout(news, NEWS_MS);
}

start().catch((error) => main.replaceChildren(h("p", { class: "card problem", role: "alert" }, error.message)));
