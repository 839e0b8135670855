// A list of any length of which only what is seen is in the page, fetched page by page.

import { h } from "./dom.js";

const PAGE = 100;
const SPARE = 8;

export class VirtualList {
  // `fetchPage(offset, limit, signal)` gives {total, rows}; `draw(row)` gives the content of a row, `href(row)` its link;
  // `heads` are [class, text] of its columns.
  constructor({ label, fetchPage, draw, href, onTotal, empty, heads }) {
    Object.assign(this, { fetchPage, draw, href, onTotal });
    this.space = h("div", { class: "vspace", role: "list", "aria-label": label });
    this.note = h("p", { class: "soft vnote", hidden: true }, empty);
    this.box = h("div", { class: "vlist" }, this.note, this.space);
    // Every row says its content by itself; the heads are for the eye.
    this.node = h("div", { class: "vbox" }, h("div", { class: "row heads", "aria-hidden": "true" }, heads.map(([name, text]) => h("span", { class: name }, text))), this.box);
    this.box.addEventListener("scroll", () => this.render(), { passive: true });
    this.observer = new ResizeObserver(() => this.render());
    this.observer.observe(this.box);
    this.selected = -1;
    this.reset();
  }

  // Ask for everything anew; with `keep` rows stay until their successors are there.
  reset({ keep = false } = {}) {
    this.stopper?.abort();
    this.stopper = new AbortController();
    this.stale = keep ? new Set(this.pages.keys()) : null;
    if (!keep) {
      this.pages = new Map();
      this.total = 0;
      this.selected = -1;
      this.drawn?.forEach((node) => node.remove());
      this.drawn = new Map();
      this.box.scrollTop = 0;
    }
    this.asked = new Set();
    this.need(Math.floor(this.first() / PAGE), true);
  }

  close() {
    this.observer.disconnect();
    this.stopper.abort();
  }

  rowHeight() {
    return parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 52;
  }

  first() {
    return Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight()));
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  async need(page, always = false) {
    const known = this.pages.has(page) && !this.stale?.has(page);
    if (this.asked.has(page) || (!always && (known || page * PAGE >= this.total))) return;
    this.asked.add(page);
    try {
      const answer = await this.fetchPage(page * PAGE, PAGE, this.stopper.signal);
      this.stale?.delete(page);
      this.pages.set(page, answer.rows);
      this.total = answer.total;
      this.note.hidden = this.total > 0;
      this.onTotal?.(this.total);
      for (const [index, node] of this.drawn) {
        if (Math.floor(index / PAGE) === page || index >= this.total) this.drop(index, node);
      }
      this.render();
    } catch (error) {
      if (error.name !== "AbortError") this.onTotal?.(null, error);
    }
  }

  drop(index, node) {
    if (node.contains(document.activeElement)) this.refocus = index;
    node.remove();
    this.drawn.delete(index);
  }

  render() {
    const height = this.rowHeight();
    this.space.style.setProperty("height", `${this.total * height}px`);
    this.box.style.setProperty("--content", `${this.total * height + 2}px`);
    const begin = Math.max(0, this.first() - SPARE);
    const end = Math.min(this.total, this.first() + Math.ceil(this.box.clientHeight / height) + SPARE);
    for (const [index, node] of this.drawn) if (index < begin || index >= end) this.drop(index, node);
    for (let index = begin; index < end; index += 1) {
      this.need(Math.floor(index / PAGE));
      const row = this.row(index);
      if (!row || this.drawn.has(index)) continue;
      const inside = h("a", { class: "row", href: this.href(row), onfocus: () => this.select(index, false) }, this.draw(row));
      const node = h("div", { class: "item", role: "listitem", "aria-posinset": index + 1, "aria-setsize": this.total }, inside);
      node.style.setProperty("transform", `translateY(${index * height}px)`);
      node.classList.toggle("selected", index === this.selected);
      this.space.append(node);
      this.drawn.set(index, node);
      if (this.refocus === index) {
        this.refocus = undefined;
        inside.focus({ preventScroll: true });
      }
    }
  }

  move(by) {
    if (this.total) this.select(Math.min(this.total - 1, Math.max(0, this.selected + by)), true);
  }

  select(index, focus) {
    this.drawn.get(this.selected)?.classList.remove("selected");
    this.selected = index;
    if (focus) {
      const height = this.rowHeight();
      const top = index * height;
      if (top < this.box.scrollTop) this.box.scrollTop = top;
      else if (top + height > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + height - this.box.clientHeight;
      this.refocus = index;
      this.render();
      const node = this.drawn.get(index);
      if (node) {
        this.refocus = undefined;
        node.firstChild.focus({ preventScroll: true });
      }
    }
    this.drawn.get(index)?.classList.add("selected");
  }
}
