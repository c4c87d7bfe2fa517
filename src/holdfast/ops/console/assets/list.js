// A list that reads pages on demand and keeps only the visible rows as elements.

import { append, h, replace } from "./dom.js";

const ROW_PX = 36;
const EXTRA_ROWS = 12;
const PAGE = 200;

export class PagedList {
  // `fetch(cursor, limit, signal)` returns `{items, next}`. A column has `label`, `show(item)`, and optionally `width`,
  // `wide` (hidden on narrow screens) and `number`. `href(item)` is the target of a row.
  constructor({ label, columns, fetch, href = null, empty = "none", total = null }) {
    this.label = label;
    this.columns = columns;
    this.fetch = fetch;
    this.href = href;
    this.empty = empty;
    this.total = total;
    this.pages = [];
    this.next = undefined;
    this.busy = null;
    this.rows = new Map();
    this.body = h("div", { role: "presentation", class: "rows" });
    this.scroller = h("div", { class: "viewport", tabindex: 0, role: "rowgroup", "aria-label": `rows of ${label}` }, this.body);
    this.status = h("p", { class: "quiet", role: "status" });
    const head = columns.map((one) => h("div", { role: "columnheader", class: cellClass(one) }, one.label));
    this.grid = h("div", { role: "table", "aria-label": label, class: "list" },
      h("div", { role: "rowgroup" }, h("div", { role: "row", class: "head" }, head)),
      this.scroller);
    this.node = h("div", {}, this.grid, this.status);
    this.#template();
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.scroller);
    this.narrow = window.matchMedia("(max-width: 700px)");
    this.onNarrow = () => this.#template();
    this.narrow.addEventListener("change", this.onNarrow);
  }

  #template() {
    const narrow = window.matchMedia("(max-width: 700px)").matches;
    const shown = this.columns.filter((one) => !(narrow && one.wide));
    this.grid.style.setProperty("--columns", shown.map((one) => one.width ?? "minmax(0, 1fr)").join(" "));
  }

  close() {
    this.closed = true;
    this.busy?.abort();
    this.observer.disconnect();
    this.narrow.removeEventListener("change", this.onNarrow);
  }

  get length() {
    return this.pages.reduce((sum, page) => sum + page.items.length, 0);
  }

  // Read from the start.
  async load() {
    this.busy?.abort();
    this.busy = null;
    this.pages = [];
    this.next = undefined;
    this.problem = null;
    this.scroller.scrollTop = 0;
    await this.#more();
  }

  async #read(cursor) {
    const abort = new AbortController();
    this.busy = abort;
    try {
      return await this.fetch(cursor ?? "", PAGE, abort.signal);
    } finally {
      if (this.busy === abort) this.busy = null;
    }
  }

  async #more() {
    if (this.busy || this.next === null || this.closed) return;
    const cursor = this.next;
    try {
      const page = await this.#read(cursor);
      if (this.closed || this.next !== cursor) return;
      this.pages.push({ cursor, items: page.items, next: page.next ?? null });
      this.next = page.next ?? null;
      this.problem = null;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.problem = error;
    }
    this.draw();
  }

  // Read the visible page again. A page that ends elsewhere now drops the pages after it.
  async refresh() {
    if (this.busy || this.closed) return;
    const top = Math.floor(this.scroller.scrollTop / ROW_PX);
    let at = 0;
    let before = 0;
    while (at < this.pages.length - 1 && before + this.pages[at].items.length <= top) {
      before += this.pages[at].items.length;
      at += 1;
    }
    const page = this.pages[at];
    const cursor = page?.cursor;
    try {
      const fresh = await this.#read(cursor);
      if (this.closed || this.pages[at] !== page) return;
      const next = fresh.next ?? null;
      if (page === undefined || page.next !== next) {
        this.pages.length = at;
        this.next = next;
      }
      this.pages[at] = { cursor, items: fresh.items, next };
      this.problem = null;
    } catch (error) {
      if (error.name === "AbortError") return;
      this.problem = error;
    }
    this.draw();
  }

  #item(index) {
    let left = index;
    for (const page of this.pages) {
      if (left < page.items.length) return page.items[left];
      left -= page.items.length;
    }
    return undefined;
  }

  draw() {
    if (this.closed) return;
    const length = this.length;
    this.body.style.height = `${length * ROW_PX}px`;
    const top = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_PX) - EXTRA_ROWS);
    const visible = Math.ceil((this.scroller.clientHeight || 400) / ROW_PX) + 2 * EXTRA_ROWS;
    const bottom = Math.min(length, top + visible);
    const focused = document.activeElement?.closest?.("[data-row]")?.dataset.row;
    for (const [index, row] of this.rows) {
      const item = this.#item(index);
      if (index < top || index >= bottom || row.item !== item) {
        row.element.remove();
        this.rows.delete(index);
      }
    }
    for (let index = top; index < bottom; index += 1) {
      if (!this.rows.has(index)) {
        const item = this.#item(index);
        const element = this.#row(item, index);
        this.rows.set(index, { item, element });
        this.body.append(element);
      }
    }
    if (focused !== undefined && !this.body.contains(document.activeElement)) {
      this.rows.get(Number(focused))?.element.querySelector("a")?.focus({ preventScroll: true });
    }
    this.grid.hidden = length === 0;
    const known = this.next === null ? length : -1;
    this.grid.setAttribute("aria-rowcount", known === -1 ? -1 : known + 1);
    this.#say(length);
    // A failed read waits for the next refresh.
    if (!this.problem && bottom >= length - visible) this.#more();
  }

  #say(length) {
    if (this.problem) replace(this.status, h("span", { class: "problem" }, this.problem.message));
    else if (this.next === undefined) replace(this.status, "loading …");
    else if (!length) replace(this.status, this.empty);
    else replace(this.status, this.next === null ? `${length.toLocaleString("en")} in all` : `${length.toLocaleString("en")} read, more follow`);
  }

  #row(item, index) {
    const row = h("div", { role: "row", class: "row", "data-row": index, "aria-rowindex": index + 2 });
    row.style.transform = `translateY(${index * ROW_PX}px)`;
    this.columns.forEach((column, at) => {
      const cell = h("div", { role: at === 0 ? "rowheader" : "cell", class: cellClass(column) });
      const shown = column.show(item);
      append(cell, [at === 0 && this.href ? h("a", { href: this.href(item) }, shown) : shown]);
      row.append(cell);
    });
    return row;
  }
}

function cellClass(column) {
  return ["cell", column.wide ? "wide" : "", column.number ? "number" : ""].filter(Boolean).join(" ");
}
