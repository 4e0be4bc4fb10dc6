// Small parts that every page is made of.

export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A finger or a mouse button is down: what is under it stays. */
export let pressed = false;
addEventListener("pointerdown", () => { pressed = true; }, true);
// The click comes after it.
for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => setTimeout(() => { pressed = false; }, 50), true);

/** Puts new children in, and the focus back to the one that had it, by its id. */
export function fill(node, ...children) {
  const held = node.contains(document.activeElement) ? document.activeElement.id : "";
  const scrolled = new Map([...node.querySelectorAll(".scroll")].map((one) => [one.getAttribute("aria-label"), one.scrollLeft]));
  node.replaceChildren(...children.flat(9).filter(Boolean));
  for (const one of node.querySelectorAll(".scroll")) one.scrollLeft = scrolled.get(one.getAttribute("aria-label")) ?? 0;
  if (held) document.getElementById(held)?.focus();
}

/** Is it worth drawing again? When it changed, and now and then for the words that tell how long ago; not under a finger,
 * which may have come down since the data was asked for. */
export function changes() {
  let shown = "";
  let drawn = 0;
  return (data) => {
    if (pressed) return false;
    const text = JSON.stringify(data);
    if (text === shown && Date.now() - drawn < 10_000) return false;
    shown = text;
    drawn = Date.now();
    return true;
  };
}

const whole = new Intl.NumberFormat("en");
export const number = (n) => whole.format(n ?? 0);
export function rate(n) {
  if (!n) return "0";
  return n < 10 ? n.toFixed(1) : number(Math.round(n));
}

export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return seconds <= 0 ? "0 s" : "< 1 s";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function since(text) {
  return text ? (Date.now() - Date.parse(text)) / 1000 : null;
}

/** A moment: how long ago, with the exact time for those who ask. */
export function moment(text) {
  if (!text) return h("span", {}, "–");
  const away = since(text);
  const far = away < -86400 * 3650;
  const told = far ? "until somebody decides" : away < -1 ? `in ${span(-away)}` : `${span(Math.max(away, 0))} ago`;
  return h("time", { datetime: text, title: text }, told);
}

const KINDS = {
  sent: "good", succeeded: "good", ok: "good", active: "good", alive: "good", Completed: "good", success: "good", allow: "good", closed: "good",
  leased: "info", in_progress: "info", InProgress: "info", open: "info", redirected: "info", redirect: "info",
  pending: "warn", Pending: "warn", PendingRetry: "warn", paused: "warn", skipped: "warn", degraded: "warn", retry: "warn", needs_person: "bad",
  dead: "bad", failed: "bad", DeadLettered: "bad", disabled: "bad", conflict: "bad", gone: "bad", reject: "bad", takeover: "warn",
};
const WORDS = { in_progress: "in progress", needs_person: "needs a person", PendingRetry: "waits to retry", InProgress: "in progress", DeadLettered: "dead letter" };
export const badge = (word, kind) => h("span", { class: `badge ${kind ?? KINDS[word] ?? ""}` }, WORDS[word] ?? word);

/** columns: [title, "n" for numbers, cell(row)]; rows: any. */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty ?? "Nothing here.");
  const cell = ([, kind, of], row, n) => {
    const value = of(row);
    return n === 0 ? h("th", { scope: "row", class: kind }, value) : h("td", { class: kind }, value);
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, id: `table-${caption.replace(/\W/g, "-")}` },
    h("table", {},
      h("caption", { class: "sr" }, caption),
      h("thead", {}, h("tr", {}, columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column, n) => cell(column, row, n))))),
    ));
}

export function tiles(entries) {
  return h("dl", { class: "tiles" }, entries.map(([title, value, note, kind]) =>
    h("div", { class: `tile ${kind ?? ""}` }, h("dt", {}, title), h("dd", {}, value, note ? [" ", h("small", {}, note)] : null))));
}

export function facts(entries) {
  return h("dl", { class: "facts" }, entries.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function tabs(label, entries, current) {
  return h("nav", { class: "tabs", "aria-label": label }, entries.map(([name, href]) => h("a", { href, "aria-current": href === current ? "page" : null }, name)));
}

export function toast(text, bad) {
  const node = h("div", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), bad ? 9000 : 5000);
}

/** Asks in words what will happen; true if it is wanted. `fields`: inputs to fill in, answered as an object. */
export function confirm({ title, text, action, danger, fields }) {
  return new Promise((resolve) => {
    const inputs = (fields ?? []).map(([name, label, input]) => {
      input.id = `ask-${name}`;
      input.name = name;
      return [h("label", { for: input.id }, label), input];
    });
    const go = h("button", { type: "submit", class: danger ? "danger" : null, id: "confirm-go" }, action);
    const form = h("form", { method: "dialog" },
      h("h2", { id: "ask-title" }, title), text ? h("p", { id: "ask-text" }, text) : null, inputs,
      h("div", { class: "actions" }, h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"), go));
    const dialog = h("dialog", { "aria-labelledby": "ask-title", "aria-describedby": text ? "ask-text" : null }, form);
    let wanted = null;
    form.addEventListener("submit", () => { wanted = Object.fromEntries(new FormData(form)); });
    dialog.addEventListener("close", () => { dialog.remove(); resolve(wanted); });
    document.body.append(dialog);
    dialog.showModal();
    if (!inputs.length) go.focus();
  });
}

/** Does something and says how it went. */
export async function attempt(work, done) {
  try {
    const answer = await work();
    if (done) toast(typeof done === "function" ? done(answer) : done);
    document.dispatchEvent(new Event("changed"));
    return answer ?? true;
  } catch (error) {
    toast(error.message, true);
    return null;
  }
}

/** A button that does one thing at a time; without the right it says so. */
export function button(text, { id, allowed = true, kind = "quiet", why = "operate" }, work) {
  const node = h("button", { type: "button", class: kind, id, disabled: !allowed, title: allowed ? null : `Needs a token with the scope ${why}` }, text);
  node.addEventListener("click", async () => {
    if (node.getAttribute("aria-busy")) return;
    // Not disabled: it would lose the focus for good.
    node.setAttribute("aria-busy", "true");
    try { await work(); } finally { node.removeAttribute("aria-busy"); }
  });
  return node;
}

/** Newer and older pages of a list whose cursors are in the address. */
export function pager(page, make) {
  const next = page.next_cursor;
  if (!next && !make.current) return null;
  return h("div", { class: "pager" }, make.current ? h("a", { href: make(null), id: "newest" }, "Newest") : null, next ? h("a", { href: make(next), id: "older" }, page.items.length ? "Older" : "Search further") : null);
}

/** What an empty page says: a list looks only so far at a time. */
export const nothing = (page, text) => (page.next_cursor ? "Nothing so far. What is older was not looked at yet." : text);
