// Messages: find them, and see the whole way of one.

import { get, may, past, post, query } from "./api.js";
import { attempt, badge, button, changes, confirm, facts, fill, h, moment, nothing, number, pager, table } from "./parts.js";

const STATUSES = ["", "pending", "leased", "sent", "dead"];

/** What somebody typed may be an id, a key and a target at once: all that it finds, in this order. */
async function find(text, lane, status, cursor) {
  const list = (more) => get(query("/v1/outbox", { lane, status, cursor, limit: 50, ...more }));
  if (!text) return list({});
  const page = await list({ target: text });
  // The pages that follow are of the target alone.
  if (cursor) return page;
  const first = await get(query("/v1/outbox", { lane, status, key: text, limit: 50 }));
  const found = first.items;
  if (/^\d{1,18}$/.test(text)) {
    // The list asks for ids below the cursor.
    const at = await get(query("/v1/outbox", { lane, status, cursor: String(BigInt(text) + 1n), limit: 1 }));
    found.unshift(...at.items.filter((one) => String(one.id) === text));
  }
  const known = new Set();
  page.items = [...found, ...page.items].filter((one) => !known.has(one.id) && known.add(one.id));
  return page;
}

export function messages(main, { lane, status, q, cursor }, every) {
  const lanes = Object.keys(past.at(-1)?.lanes ?? {});
  const option = (value, chosen, name) => h("option", { value, selected: value === chosen }, name);
  const form = h("form", { class: "row", role: "search", onsubmit: (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form));
    location.hash = query("#/messages", given);
  } },
    h("div", {}, h("label", { for: "q" }, "Id, key or target"), h("input", { id: "q", name: "q", type: "search", value: q, placeholder: "42, invoice-7, https://…" })),
    h("div", {}, h("label", { for: "lane" }, "Lane"), h("select", { id: "lane", name: "lane" }, option("", lane ?? "", "all"), lanes.map((name) => option(name, lane, name)))),
    h("div", {}, h("label", { for: "status" }, "Status"), h("select", { id: "status", name: "status" }, STATUSES.map((name) => option(name, status ?? "", name || "all")))),
    h("button", { type: "submit" }, "Search"));
  for (const select of form.querySelectorAll("select")) select.addEventListener("change", () => form.requestSubmit());
  const list = h("div", { class: "card" }, h("p", { class: "hint" }, "Loading…"));
  main.append(h("div", { class: "head" }, h("h1", {}, "Messages")), h("div", { class: "card" }, form), list);

  const make = (next) => query("#/messages", { lane, status, q, cursor: next });
  make.current = cursor;
  const changed = changes();
  return every(async () => {
    const page = await find((q ?? "").trim(), lane, status, cursor);
    if (!changed(page)) return;
    fill(list, table("Messages", [
      ["Id", "", (m) => h("a", { href: `#/messages/${m.id}`, id: `m-${m.id}` }, String(m.id))],
      ["Lane", "", (m) => m.lane], ["Status", "", (m) => badge(m.status)],
      ["Target", "", (m) => h("span", { class: "mono" }, m.target ?? "–")], ["Failed", "n", (m) => number(m.attempts)],
      ["Last error", "", (m) => (m.last_error_code ? h("code", {}, m.last_error_code) : "–")], ["Enqueued", "nowrap", (m) => moment(m.created_at)],
      ["Next or ended", "nowrap", (m) => moment(m.finished_at ?? (m.status === "leased" ? m.lease_until : m.due_at))],
    ], page.items, nothing(page, q ? "No message has this id, key or target." : "No messages.")), pager(page, make));
  });
}

/** What happened to a message, in order. */
export function timeline(message) {
  const steps = [{ at: message.created_at, kind: "info", title: "Enqueued", text: `lane ${message.lane}, ${number(message.payload_bytes)} bytes` }];
  const history = message.history ?? [];
  if (message.history_truncated) steps.push({ at: message.created_at, untimed: true, kind: "info", title: "Earlier attempts", text: `only the latest ${number(history.length)} are shown` });
  for (const [index, one] of history.entries()) {
    const by = one.worker ? ` by ${one.worker}` : "";
    const told = {
      retry: ["warn", `Attempt ${one.attempt} failed, to be tried again`],
      dead: ["bad", one.attempt ? `Attempt ${one.attempt} failed for good` : "Buried without an attempt"],
      takeover: ["warn", "Taken over: its worker never came back"],
    }[one.kind] ?? ["", one.kind];
    steps.push({ at: one.at, kind: told[0], title: told[1], text: [one.code, one.error].filter(Boolean).join(": ") + by });
    // Only an operator brings back what is dead. When is not recorded; that it was, the rest of its way tells.
    if (one.kind === "dead" && (index + 1 < history.length || message.status !== "dead")) {
      steps.push({ at: one.at, untimed: true, kind: "info", title: "Requeued", text: "with a new budget of attempts" });
    }
  }
  if (message.claimed_by && message.claimed_at) {
    const word = message.status === "pending" ? "Last claimed" : "Claimed";
    steps.push({ at: message.claimed_at, kind: "info", title: `${word} by ${message.claimed_by}`, text: `lease token ${message.lease_token}` });
  }
  if (message.status === "sent") steps.push({ at: message.finished_at, kind: "good", title: "Sent", text: message.result_ref ? `result ${message.result_ref}` : "" });
  if (message.status === "dead" && !history.some((one) => one.kind === "dead")) {
    steps.push({ at: message.finished_at, kind: "bad", title: "Dead", text: [message.last_error_code, message.last_error].filter(Boolean).join(": ") });
  }
  if (message.status === "pending") steps.push({ at: message.due_at, kind: "", title: Date.parse(message.due_at) > Date.now() ? "To be tried" : "Due", text: "", last: true });
  steps.sort((a, b) => (a.last ? 1 : 0) - (b.last ? 1 : 0) || Date.parse(a.at) - Date.parse(b.at));
  return h("ol", { class: "timeline" }, steps.map((step) => h("li", { class: step.kind }, h("strong", {}, step.title), step.text ? h("div", {}, step.text) : null, step.untimed ? null : h("time", { datetime: step.at }, step.at))));
}

export function message(main, { id }, every) {
  const body = h("div", {}, h("p", { class: "hint" }, "Loading…"));
  main.append(h("div", { class: "head" }, h("h1", {}, `Message ${id}`), h("a", { href: "#/messages" }, "All messages")), body);
  const changed = changes();
  return every(async () => {
    const m = await get(`/v1/outbox/${id}`);
    if (!changed(m)) return;
    // The lanes of parts have doors of their own.
    const door = {
      webhooks: h("a", { href: "#/webhooks/dead-letters" }, "Requeue it among the dead letters"),
      orders: m.active_key ? h("a", { href: `#/orders/${encodeURIComponent(m.active_key)}` }, "To its order") : "",
      memory: h("span", {}, "Bring it back: ", h("code", {}, `postrider memory requeue ${id}`)),
    }[m.lane];
    const back = m.status !== "dead" ? null : door !== undefined ? door : button("Requeue", { id: "requeue", allowed: may("operate"), kind: "" }, async () => {
      if (!(await confirm({ title: `Requeue message ${id}?`, text: "It is tried again under its id and its idempotency key, with a new budget of attempts.", action: "Requeue" }))) return;
      await attempt(() => post(`/v1/outbox/${id}/requeue`), `Message ${id} is due again.`);
    });
    fill(body,
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "State"), badge(m.status), back), facts([
        ["Lane", h("a", { href: `#/lane/${encodeURIComponent(m.lane)}` }, m.lane)], ["Target", m.target], ["Failed attempts", `${m.attempts}${m.crashes ? `, and ${m.crashes} taken over` : ""}`],
        ["Due", m.finished_at ? null : moment(m.due_at)], ["Held by", m.status === "leased" ? h("code", {}, m.locked_by) : null], ["Lease until", m.status === "leased" ? moment(m.lease_until) : null],
        ["Active key", m.active_key && h("code", {}, m.active_key)], ["Last error", m.last_error_code && h("span", {}, h("code", {}, m.last_error_code), ` ${m.last_error ?? ""}`)],
        ["Payload", `${number(m.payload_bytes)} bytes, ${m.content_type ?? "no type"}`], ["SHA-256", m.payload_sha && h("code", {}, m.payload_sha)], ["Correlation id", m.correlation_id && h("code", {}, m.correlation_id)],
        ["Deliver before", m.deliver_before], ["Ended", m.finished_at && moment(m.finished_at)],
      ])),
      h("section", { class: "card" }, h("h2", {}, "Timeline"), timeline(m)));
  });
}
