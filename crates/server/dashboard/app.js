// The frame: sign in, find the page for the address, keep it fresh.

import { Refused, may, onSample, post, send, session, stop, watch, whoAmI } from "./api.js";
import { message, messages } from "./messages.js";
import { overview } from "./overview.js";
import { fill, h, pressed, toast } from "./parts.js";
import { dead_letters, memories, order, orders, saga, sagas, subscription, subscriptions, workers } from "./peers.js";

const PAGES = [["Overview", "#/"], ["Messages", "#/messages"], ["Webhooks", "#/webhooks"], ["Orders", "#/orders"], ["Memories", "#/memories"], ["Workers", "#/workers"]];
const ROUTES = [
  [/^\/$/, overview, []], [/^\/lane\/([^/]+)$/, overview, ["lane"]], [/^\/messages$/, messages, []], [/^\/messages\/(\d+)$/, message, ["id"]],
  [/^\/webhooks$/, subscriptions, []], [/^\/webhooks\/sagas$/, sagas, []], [/^\/webhooks\/sagas\/(\d+)$/, saga, ["id"]], [/^\/webhooks\/dead-letters$/, dead_letters, []], [/^\/webhooks\/(\d+)$/, subscription, ["id"]],
  [/^\/orders$/, orders, []], [/^\/orders\/(.+)$/, order, ["key"]], [/^\/memories$/, memories, []], [/^\/workers$/, workers, []],
];
/** Lists are asked for again at most this often. */
const GENTLY_MS = 2000;

const main = document.getElementById("main");
const nav = document.getElementById("nav");
let leave = () => {};
let signed_in = false;

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** A token for some lanes has no business with the pages of other parts. */
function pages() {
  const part = { "#/webhooks": "webhooks", "#/orders": "orders", "#/memories": "memory" };
  return PAGES.filter(([, href]) => !session.lanes.length || !part[href] || session.lanes.includes(part[href]));
}

function place() {
  const [path, search] = (location.hash.slice(1) || "/").split("?");
  for (const [pattern, page, names] of ROUTES) {
    const found = pattern.exec(path);
    if (found) return { page, values: { ...Object.fromEntries(new URLSearchParams(search)), ...Object.fromEntries(names.map((name, n) => [name, decoded(found[n + 1])])) }, path };
  }
  return null;
}

/** Runs `work` now and with the samples, one at a time, until the page is left. */
function every(work) {
  let gone = false;
  let busy = false;
  let first = true;
  let again = false;
  let next = 0;
  const note = h("p", { class: "note bad", role: "alert", hidden: true });
  main.prepend(note);
  const run = async () => {
    if (gone || busy || document.hidden || performance.now() < next) return;
    // Somebody is writing or deciding: what is under their hands stays.
    if (!first && (pressed || document.querySelector("dialog[open]"))) return;
    busy = true;
    const begun = performance.now();
    let pause = GENTLY_MS;
    try {
      await work();
      note.hidden = true;
      // What costs the server more is asked for less often.
      pause = Math.min(Math.max(GENTLY_MS, (performance.now() - begun) * 100), 20_000);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      note.textContent = error.message;
      note.hidden = false;
    } finally {
      busy = first = false;
      next = again ? 0 : performance.now() + pause;
    }
    if (again) {
      again = false;
      run();
    }
  };
  run();
  const off = onSample(run);
  const clock = setInterval(run, GENTLY_MS);
  const soon = () => { again = busy; next = 0; run(); };
  document.addEventListener("changed", soon);
  return () => { gone = true; off(); clearInterval(clock); document.removeEventListener("changed", soon); };
}

function show() {
  if (!signed_in) return;
  leave();
  leave = () => {};
  const found = place();
  const section = found ? (found.path === "/" || found.path.startsWith("/lane") ? "#/" : `#/${found.path.split("/")[1]}`) : "";
  fill(nav, h("ul", {}, pages().map(([name, href]) => h("li", {}, h("a", { href, "aria-current": href === section ? "page" : null }, name)))));
  nav.hidden = false;
  main.replaceChildren();
  if (!found) {
    main.append(h("h1", {}, "Nothing here"), h("p", {}, h("a", { href: "#/" }, "To the overview")));
  } else {
    leave = found.page(main, found.values, every) ?? (() => {});
  }
  const heading = main.querySelector("h1")?.textContent ?? "Postrider";
  document.title = heading === "Overview" ? "Postrider" : `${heading} · Postrider`;
}

function sign_in(reason) {
  signed_in = false;
  leave();
  leave = () => {};
  stop();
  nav.hidden = true;
  document.getElementById("sign-out").hidden = true;
  document.getElementById("who").textContent = "";
  const wrong = h("p", { class: "error", role: "alert", hidden: !reason }, reason ?? "");
  const field = h("input", { id: "token", name: "token", type: "password", autocomplete: "current-password", required: true, placeholder: "pr_…" });
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post("/v1/session", { token: field.value.trim() });
      await begin();
    } catch (error) {
      wrong.textContent = error.message;
      wrong.hidden = false;
      field.focus();
    }
  } }, h("label", { for: "token" }, "Token"), field, wrong, h("button", { type: "submit" }, "Sign in"), h("p", { class: "hint" }, "Make one with ", h("code", {}, "postrider token create --name me --scope operate --scope read"), "."));
  main.replaceChildren(h("section", { class: "card signin" }, h("h1", {}, "Sign in"), form));
  document.title = "Sign in · Postrider";
  field.focus();
}

async function begin() {
  try {
    await whoAmI();
  } catch (error) {
    // Behind a proxy only those with a token get in.
    if (error.code === "FORWARDED_WITHOUT_TOKEN") return sign_in(error.message);
    throw error;
  }
  if (!session.signed_in) return sign_in();
  if (!may("read")) return sign_in("This token may not read. Use one with the scope read.");
  await watch();
  signed_in = true;
  document.getElementById("who").textContent = session.name ? `${session.name}${session.lanes.length ? ` (lane ${session.lanes.join(", ")})` : ""}` : "local, no token needed";
  document.getElementById("sign-out").hidden = !session.name;
  show();
}

document.getElementById("sign-out").addEventListener("click", async () => {
  await send("DELETE", "/v1/session").catch(() => {});
  sign_in();
});
document.addEventListener("signed-out", () => { if (signed_in) sign_in("You were signed out. Sign in again."); });
document.addEventListener("link", ({ detail }) => {
  const link = document.getElementById("link");
  link.className = `link ${detail ? "on" : "off"}`;
  const text = detail ? "live" : "connection lost";
  if (link.textContent !== text) link.textContent = text;
});
addEventListener("hashchange", () => { show(); main.focus(); });
// The address is the page: a jump within it must not change it.
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("unhandledrejection", (event) => toast(String(event.reason?.message ?? event.reason), true));

try {
  await begin();
} catch (error) {
  main.replaceChildren(h("p", { class: "note bad", role: "alert" }, error.message));
}
