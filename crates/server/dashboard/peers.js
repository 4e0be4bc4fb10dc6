// The pages of the parts: webhooks, orders, memories; and who works.

import { get, may, past, post, query, send } from "./api.js";
import { attempt, badge, button, changes, confirm, facts, fill, h, moment, nothing, number, pager, since, span, table, tabs, tiles, toast } from "./parts.js";

const HOOKS = [["Subscriptions", "#/webhooks"], ["Sagas", "#/webhooks/sagas"], ["Dead letters", "#/webhooks/dead-letters"]];

/** A page whose body is drawn again when what it shows has changed. */
function refreshed(main, head, every, load, draw) {
  const body = h("div", {}, h("p", { class: "hint" }, "Loading…"));
  main.append(...head, body);
  const changed = changes();
  return every(async () => {
    const data = await load();
    if (changed(data)) fill(body, draw(data));
  });
}

const title = (text, ...more) => h("div", { class: "head" }, h("h1", {}, text), ...more);

// ---- webhooks ----

export function subscriptions(main, { cursor }, every) {
  const make = (next) => query("#/webhooks", { cursor: next });
  make.current = cursor;
  const add = button("New subscription", { id: "subscribe", allowed: may("operate"), kind: "" }, subscribe);
  return refreshed(main, [title("Webhooks", add), tabs("Webhooks", HOOKS, "#/webhooks")], every, () => get(query("/v1/subscriptions", { cursor, limit: 50 })), (page) =>
    h("div", { class: "card" }, table("Subscriptions", [
      ["Id", "", (s) => h("a", { href: `#/webhooks/${s.id}`, id: `s-${s.id}` }, String(s.id))], ["URL", "", (s) => h("span", { class: "mono" }, s.url)],
      ["Events", "", (s) => s.event_types.join(", ")], ["State", "", (s) => badge(s.status)],
      ["Health", "", (s) => (s.failing_since ? h("span", {}, badge("failing", "bad"), " for ", span(since(s.failing_since))) : badge("healthy", "good"))],
    ], page.items, "No subscriptions yet."), pager(page, make)));
}

async function subscribe() {
  const given = await confirm({ title: "New subscription", action: "Create", fields: [
    ["url", "URL", h("input", { type: "url", required: true, placeholder: "https://example.com/hooks" })],
    ["types", "Event types, with commas between", h("input", { type: "text", value: "*", required: true })],
  ] });
  if (!given) return;
  const made = await attempt(() => post("/v1/subscriptions", { url: given.url, event_types: given.types.split(",").map((one) => one.trim()).filter(Boolean) }));
  if (made) await tell_secret(made.secret, `Subscription ${made.id} is made.`);
}

async function tell_secret(secret, text) {
  await confirm({ title: "Its secret", text: `${text} The secret is shown here and never again.`, action: "Done", fields: [["secret", "Secret", h("input", { type: "text", readonly: true, value: secret })]] });
}

export function subscription(main, { id }, every) {
  const done = (verb, text) => attempt(() => post(`/v1/subscriptions/${id}/${verb}`), text);
  return refreshed(main, [title(`Subscription ${id}`, h("a", { href: "#/webhooks" }, "All subscriptions"))], every,
    async () => {
      const [one, sagas] = await Promise.all([get(`/v1/subscriptions/${id}`), get(query("/v1/sagas", { subscription_id: id, limit: 20 }))]);
      return { one, sagas };
    },
    ({ one, sagas }) => {
      const operate = { allowed: may("operate") };
      const hold = one.status === "active"
        ? button("Pause", { id: "pause", ...operate }, async () => (await confirm({ title: `Pause subscription ${id}?`, text: "Its events wait until it is resumed.", action: "Pause" })) && done("pause", "It is paused."))
        : button("Resume", { id: "resume", ...operate }, () => done("resume", "It goes on."));
      const rotate = button("Rotate secret", { id: "rotate", ...operate }, async () => {
        if (!(await confirm({ title: "Make a new secret?", text: "The old one signs too for a day, so that receivers can change over.", action: "Rotate" }))) return;
        const answer = await attempt(() => post(`/v1/subscriptions/${id}/rotate-secret`, {}));
        if (answer?.secret) await tell_secret(answer.secret, "The secret is rotated.");
      });
      const test = button("Send a test", { id: "test", ...operate }, async () => {
        const answer = await attempt(() => post(`/v1/subscriptions/${id}/test`));
        if (!answer) return;
        const how = [answer.response_status && `HTTP ${answer.response_status}`, answer.error_code, `${number(answer.duration_ms)} ms`].filter(Boolean).join(", ");
        toast(`The test event ${answer.success ? "was taken" : "was not taken"}: ${how}.`, !answer.success);
      });
      const replay = button("Replay", { id: "replay", ...operate }, () => replay_events(one));
      return [
        h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "State"), badge(one.status), one.failing_since ? badge("failing", "bad") : null), facts([
          ["URL", h("span", { class: "mono" }, one.url)], ["Events", one.event_types.join(", ")], ["Description", one.description], ["Signature", one.signature], ["Headers", one.headers.join(", ")],
          ["Failing since", one.failing_since && moment(one.failing_since)], ["Why disabled", one.disabled_reason], ["Attempts at most", one.max_retry_limit && number(one.max_retry_limit)],
          ["Rate limit", one.rate_per_sec && `${one.rate_per_sec}/s`],
        ]), h("div", { class: "actions" }, hold, rotate, test, replay)),
        h("section", { class: "card" }, h("h2", {}, "Latest sagas"), saga_table(sagas.items, nothing(sagas, "No sagas."))),
      ];
    });
}

async function replay_events(one) {
  const day = (ms) => new Date(ms).toISOString().slice(0, 16);
  const given = await confirm({ title: "Send events of a time range again", text: "Times are UTC.", action: "Count them", fields: [
    ["from", "From", h("input", { type: "datetime-local", required: true, value: day(Date.now() - 3600e3) })], ["to", "To", h("input", { type: "datetime-local", required: true, value: day(Date.now()) })],
  ] });
  if (!given) return;
  const wish = { subscription_id: one.id, from: `${given.from}:00Z`, to: `${given.to}:00Z` };
  const counted = await attempt(() => post("/v1/replays", { ...wish, dry_run: true }));
  if (!counted) return;
  if (!(await confirm({ title: `Send ${number(counted.count)} events again?`, text: `To ${one.url}.`, action: `Send ${number(counted.count)}` }))) return;
  await attempt(() => post("/v1/replays", { ...wish, dry_run: false }), (answer) => `Replay ${answer.replay_id} sends ${number(answer.count)} events.`);
}

const saga_state = (s) => badge(s.held ? "parked" : s.status, s.held ? "warn" : undefined);

const saga_table = (items, empty = "No sagas.") => table("Sagas", [
  ["Saga", "", (s) => h("a", { href: `#/webhooks/sagas/${s.id}`, id: `g-${s.id}` }, String(s.id))], ["Event", "n", (s) => String(s.event_id)],
  ["Subscription", "n", (s) => h("a", { href: `#/webhooks/${s.subscription_id}` }, String(s.subscription_id))], ["State", "", saga_state],
  ["Attempts", "n", (s) => number(s.attempt_count)], ["Error", "", (s) => (s.final_error_code ? h("code", {}, s.final_error_code) : "–")], ["Next", "nowrap", (s) => (s.next_attempt_at ? moment(s.next_attempt_at) : "–")], ["Since", "nowrap", (s) => moment(s.created_at)],
], items, empty);

export function sagas(main, { status, cursor }, every) {
  const make = (next) => query("#/webhooks/sagas", { status, cursor: next });
  make.current = cursor;
  const states = ["", "Pending", "InProgress", "PendingRetry", "Completed", "DeadLettered"];
  const choose = h("select", { id: "saga-status", onchange: () => { location.hash = query("#/webhooks/sagas", { status: choose.value }); } }, states.map((one) => h("option", { value: one, selected: one === (status ?? "") }, one || "all")));
  const form = h("form", { class: "row card" }, h("div", {}, h("label", { for: "saga-status" }, "State"), choose));
  return refreshed(main, [title("Webhooks"), tabs("Webhooks", HOOKS, "#/webhooks/sagas"), form], every, () => get(query("/v1/sagas", { status, cursor, limit: 50 })), (page) => h("div", { class: "card" }, saga_table(page.items, nothing(page, "No sagas.")), pager(page, make)));
}

export function saga(main, { id }, every) {
  return refreshed(main, [title(`Saga ${id}`, h("a", { href: "#/webhooks/sagas" }, "All sagas"))], every, () => get(`/v1/sagas/${id}`), (s) => [
    h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "State"), saga_state(s)), facts([
      ["Event", String(s.event_id)], ["Subscription", h("a", { href: `#/webhooks/${s.subscription_id}` }, String(s.subscription_id))], ["Attempts", number(s.attempt_count)],
      ["Next attempt", s.next_attempt_at && moment(s.next_attempt_at)], ["Ended with", s.final_error_code && h("code", {}, s.final_error_code)], ["Job", s.jobs.length ? s.jobs.map((job) => h("a", { href: `#/messages/${job.id}` }, `message ${job.id}, ${job.status}`)) : null],
    ])),
    h("section", { class: "card" }, h("h2", {}, "Timeline"), h("ol", { class: "timeline" },
      h("li", { class: "info" }, h("strong", {}, "Made"), h("time", { datetime: s.created_at }, s.created_at)),
      s.attempts.map((a) => h("li", { class: a.error_class ? "warn" : "good" }, h("strong", {}, `Attempt ${a.attempt}: ${a.response_status ? `HTTP ${a.response_status}` : (a.error_code ?? "sent")}`),
        h("div", {}, `${a.duration_ms} ms${a.remote_address ? `, ${a.remote_address}` : ""}${a.error_class ? `, ${a.error_class.replace("_", " ")}` : ""}`), a.response_body ? h("code", {}, a.response_body.slice(0, 300)) : null, h("time", { datetime: a.started_at }, a.started_at))),
      ["Completed", "DeadLettered"].includes(s.status) ? h("li", { class: s.status === "Completed" ? "good" : "bad" }, h("strong", {}, s.status === "Completed" ? "Delivered" : "Dead letter"), h("time", { datetime: s.updated_at }, s.updated_at)) : null)),
  ]);
}

export function dead_letters(main, { cursor }, every) {
  const make = (next) => query("#/webhooks/dead-letters", { cursor: next });
  make.current = cursor;
  const all = button("Requeue all…", { id: "requeue-all", allowed: may("operate"), kind: "" }, async () => {
    const counted = await attempt(() => post("/v1/dead-letters/requeue", { filter: {}, dry_run: true }));
    if (!counted) return;
    if (!(await confirm({ title: `Requeue ${number(counted.count)} dead letters?`, text: "Each becomes a new saga and is sent again. Those of disabled subscriptions are left out.", action: `Requeue ${number(counted.count)}` }))) return;
    // In portions, until none is left that can be brought back.
    let back = 0;
    let skipped = 0;
    for (;;) {
      const answer = await attempt(() => post("/v1/dead-letters/requeue", { filter: {}, dry_run: false }));
      if (!answer) return back ? toast(`${number(back)} dead letters are on their way again; then it stopped.`, true) : undefined;
      back += answer.count;
      skipped += answer.skipped;
      if (answer.count === 0 || back >= counted.count) break;
    }
    toast(`${number(back)} dead letters are on their way again${skipped ? `, ${number(skipped)} were left out` : ""}.`);
  });
  return refreshed(main, [title("Webhooks", all), tabs("Webhooks", HOOKS, "#/webhooks/dead-letters")], every, () => get(query("/v1/dead-letters", { cursor, limit: 50 })), (page) =>
    h("div", { class: "card" }, table("Dead letters", [
      ["Id", "", (d) => String(d.id)], ["Saga", "", (d) => h("a", { href: `#/webhooks/sagas/${d.saga_id}` }, String(d.saga_id))], ["Subscription", "", (d) => h("a", { href: `#/webhooks/${d.subscription_id}` }, String(d.subscription_id))],
      ["Error", "", (d) => h("code", {}, d.final_error_code ?? "–")], ["Bytes", "n", (d) => number(d.payload_bytes)], ["Failed", "nowrap", (d) => moment(d.failed_at)],
      ["", "", (d) => (d.requeued_saga_id ? h("a", { href: `#/webhooks/sagas/${d.requeued_saga_id}` }, `requeued as saga ${d.requeued_saga_id}`) : button("Requeue", { id: `dl-${d.id}`, allowed: may("operate") }, async () => {
        if (!(await confirm({ title: `Requeue dead letter ${d.id}?`, text: "It becomes a new saga and is sent again.", action: "Requeue" }))) return;
        await attempt(() => post(`/v1/dead-letters/${d.id}/requeue`), (answer) => `It is saga ${answer.saga_id} now.`);
      }))],
    ], page.items, nothing(page, "No dead letters.")), pager(page, make)));
}

// ---- orders ----

const BOOKS = [["All", "#/orders"], ["Needs a person", "#/orders?show=needs_person"], ["Failed", "#/orders?show=failed"], ["Conflicts", "#/orders?show=conflicts"]];

export function orders(main, { show, cursor }, every) {
  if (show === "conflicts") return conflicts(main, { cursor }, every);
  const make = (next) => query("#/orders", { show, cursor: next });
  make.current = cursor;
  const about = { needs_person: "May have been executed, and the broker cannot be asked: somebody must look there and say what happened." }[show];
  return refreshed(main, [title("Orders"), tabs("Orders", BOOKS, query("#/orders", { show })), about ? h("p", { class: "hint" }, about) : ""], every, () => get(query("/v1/orders", { show, cursor, limit: 50 })), (page) =>
    h("div", { class: "card" }, table("Orders", [
      ["Key", "", (o) => (o.idempotency_key ? h("a", { class: "mono", href: `#/orders/${encodeURIComponent(o.idempotency_key)}`, id: `o-${o.outbox_id}` }, o.idempotency_key) : "–")], ["Instrument", "", (o) => o.instrument ?? "–"],
      ["State", "", (o) => badge(o.status)], ["Reason", "", (o) => (o.reason_code ? h("code", {}, o.reason_code) : "–")], ["Broker's reference", "", (o) => h("span", { class: "mono" }, o.broker_ref ?? "–")],
      ["Attempts", "n", (o) => number(o.attempts)], ["Replays", "n", (o) => number(o.replays)], ["Message", "", (o) => h("a", { href: `#/messages/${o.outbox_id}` }, String(o.outbox_id))], ["First seen", "nowrap", (o) => moment(o.first_seen_at)],
    ], page.items, nothing(page, show === "needs_person" ? "Nothing waits for a person." : "No orders.")), pager(page, make)));
}

function conflicts(main, { cursor }, every) {
  const make = (next) => query("#/orders", { show: "conflicts", cursor: next });
  make.current = cursor;
  const about = "They came under the key of another order and were refused; nothing was sent. The order that has the key stands.";
  return refreshed(main, [title("Orders"), tabs("Orders", BOOKS, "#/orders?show=conflicts"), h("p", { class: "hint" }, about)], every, () => get(query("/v1/orders/conflicts", { cursor, limit: 50 })), (page) =>
    h("div", { class: "card" }, table("Conflicts", [
      ["Key", "", (c) => h("a", { class: "mono", href: `#/orders/${encodeURIComponent(c.idempotency_key)}`, id: `c-${c.id}` }, c.idempotency_key)], ["Instrument", "", (c) => c.instrument ?? "–"],
      ["Came", "n", (c) => `${number(c.times)} ×`], ["By", "", (c) => (c.outbox_id ? h("a", { href: `#/messages/${c.outbox_id}` }, `message ${c.outbox_id}`) : "request")],
      ["Its digest", "", (c) => h("span", { class: "mono", title: c.request_digest }, c.request_digest.slice(0, 12) || "–")], ["First", "nowrap", (c) => moment(c.first_seen_at)], ["Last", "nowrap", (c) => moment(c.last_seen_at)],
    ], page.items, "No conflicts."), pager(page, make)));
}

export function order(main, { key }, every) {
  const path = `/v1/ledger/${encodeURIComponent(key)}`;
  return refreshed(main, [title("Order", h("a", { href: "#/orders" }, "All orders"))], every, async () => {
    const entry = await get(path);
    const message = entry.outbox_id ? await get(`/v1/outbox/${entry.outbox_id}`).catch(() => null) : null;
    return { entry, message };
  }, ({ entry, message }) => {
    const waits = entry.status === "in_progress" && message?.last_error_code === "NEEDS_RECONCILE";
    const settle = (as) => button(`It was ${as === "succeeded" ? "executed" : "not executed"}`, { id: `settle-${as}`, allowed: may("operate"), kind: as === "failed" ? "quiet" : "" }, async () => {
      const fields = [["reason", "Why you know", h("input", { type: "text", required: true })]];
      if (as === "succeeded") fields.push(["broker_ref", "Broker's reference", h("input", { type: "text" })]);
      const given = await confirm({ title: `Settle this order as ${as}?`, text: "This is final and goes into the ledger with your token's name.", action: "Settle", danger: as === "failed", fields });
      if (given) await attempt(() => post(`${path}/settle`, { as, reason: given.reason, broker_ref: given.broker_ref || undefined }), `The order is settled: ${as}.`);
    });
    const back = button("Requeue", { id: "requeue-order", allowed: may("operate"), kind: "" }, async () => {
      if (await confirm({ title: "Requeue this order?", text: "It is sent to the broker again under the same key.", action: "Requeue" })) await attempt(() => post(`${path}/requeue`), "The order is due again.");
    });
    return [
      waits ? h("p", { class: "note bad", role: "alert" }, "It may have been executed. Look at the broker under this key, then say what happened.") : null,
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Ledger entry"), badge(waits ? "needs_person" : entry.status)), facts([
        ["Key", h("code", {}, entry.idempotency_key)], ["Answer", entry.http_status && `HTTP ${entry.http_status}`], ["Reason", entry.reason_code && h("code", {}, entry.reason_code)], ["Broker's reference", entry.broker_ref && h("code", {}, entry.broker_ref)],
        ["Message", entry.outbox_id && h("a", { href: `#/messages/${entry.outbox_id}` }, String(entry.outbox_id))], ["Digest", h("code", {}, entry.request_digest)], ["Replays", number(entry.replays)], ["First seen", moment(entry.first_seen_at)], ["Ended", entry.finished_at && moment(entry.finished_at)], ["Forgotten", entry.expires_at && moment(entry.expires_at)],
        ["Result", entry.response && h("code", {}, JSON.stringify(entry.response))],
      ]), h("div", { class: "actions" }, waits ? [settle("succeeded"), settle("failed")] : null, entry.status === "failed" ? back : null)),
      h("section", { class: "card" }, h("h2", {}, "How it moved"), h("ol", { class: "timeline" }, h("li", { class: "info" }, h("strong", {}, "Taken in"), h("time", { datetime: entry.first_seen_at }, entry.first_seen_at)),
        entry.events.map((e) => h("li", { class: { succeeded: "good", failed: "bad" }[e.to_status] ?? "warn" }, h("strong", {}, e.to_status.replace("_", " ")), h("div", {}, `by ${e.actor}${e.reason ? `: ${e.reason}` : ""}`), h("time", { datetime: e.at }, e.at))))),
    ];
  });
}

// ---- memories ----

export function memories(main, { correlation_id, cursor }, every) {
  const make = (next) => query("#/memories", { correlation_id, cursor: next });
  make.current = cursor;
  const form = h("form", { class: "row card", role: "search", onsubmit: (event) => {
    event.preventDefault();
    location.hash = query("#/memories", Object.fromEntries(new FormData(form)));
  } }, h("div", {}, h("label", { for: "correlation_id" }, "Correlation id"), h("input", { id: "correlation_id", name: "correlation_id", type: "search", value: correlation_id })), h("button", { type: "submit" }, "Show its audit"));
  let health = null, asked = 0;
  return refreshed(main, [title("Memories")], every, async () => {
    // The gate makes checks of its own each time; ten seconds are soon enough.
    if (!health || performance.now() - asked > 10_000) {
      health = await get("/health");
      asked = performance.now();
    }
    if (health.capabilities.openmemory === undefined || past.at(-1)?.openmemory === null) return { health, none: true };
    const [deferred, audit] = await Promise.all([get("/v1/outbox?lane=memory&status=pending&limit=20"), get(query("/v1/audit", { correlation_id, cursor, limit: 30 }))]);
    // The list is only the newest of them.
    const waiting = deferred.next_cursor ? past.at(-1)?.lanes?.memory?.pending ?? deferred.items.length : deferred.items.length;
    return { health, deferred, audit, waiting };
  }, ({ health, deferred, audit, waiting, none }) => [
    h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Gate"), badge(health.status), h("span", {}, `mode ${health.mode}`)), health.reason ? h("p", {}, health.reason) : null,
      table("Capabilities", [["Capability", "", ([name]) => name], ["State", "", ([, state]) => badge(state)], ["Skipped by", "", ([name]) => health.skipped_by?.[name] ?? "–"]], Object.entries(health.capabilities))),
    none ? h("p", { class: "hint" }, "The memory gateway is not configured here: add [memory] to postrider.toml.") : [
      tiles([["Deferred", number(waiting), "waiting", waiting ? "bad" : ""], ["OpenMemory", health.capabilities.openmemory]]),
      h("section", { class: "card" }, h("h2", {}, "Deferred memories"), table("Deferred memories", [
        ["Message", "", (m) => h("a", { href: `#/messages/${m.id}`, id: `d-${m.id}` }, String(m.id))], ["Space", "", (m) => m.target ?? "–"], ["Why", "", (m) => (m.last_error_code ? h("code", {}, m.last_error_code) : "–")], ["Since", "nowrap", (m) => moment(m.created_at)], ["Next try", "nowrap", (m) => moment(m.due_at)],
      ], deferred.items, nothing(deferred, "Nothing is deferred.")), deferred.next_cursor ? h("p", {}, h("a", { href: "#/messages?lane=memory&status=pending", id: "all-deferred" }, "All of them")) : null,
        h("p", {}, h("a", { href: "#/messages?lane=memory&status=dead", id: "given-up" }, "Those that were given up"))),
      form,
      h("section", { class: "card" }, h("h2", {}, "Audit"), table("Audit", [
        ["When", "nowrap", (a) => moment(a.created_at)], ["Action", "", (a) => badge(a.action)], ["State", "", (a) => badge(a.status)], ["Reason", "", (a) => a.reason], ["Space", "", (a) => a.target_space ?? "–"], ["By", "", (a) => a.actor_user_id ?? "–"],
        ["Correlation id", "", (a) => (a.correlation_id ? h("a", { class: "mono", href: query("#/memories", { correlation_id: a.correlation_id }) }, a.correlation_id) : "–")], ["Message", "", (a) => (a.outbox_id ? h("a", { href: `#/messages/${a.outbox_id}` }, String(a.outbox_id)) : "–")],
      ], audit.items, nothing(audit, "No audit entries.")), pager(audit, make)),
    ],
  ]);
}

// ---- workers ----

export function workers(main, _, every) {
  return refreshed(main, [title("Workers"), h("p", { class: "hint" }, "Each process calls every few seconds. What it holds is its by lease; if it dies, others take it over when the lease ends.")], every, () => get("/v1/workers"), (page) =>
    h("div", { class: "card" }, table("Workers", [
      ["Worker", "", (w) => h("code", {}, w.worker)], ["State", "", (w) => badge(w.alive ? "alive" : "gone")], ["Works since", "nowrap", (w) => moment(w.started_at)],
      ["Holds", "n", (w) => number(Object.values(w.lanes).reduce((all, one) => all + one.held, 0))], ["Delivering", "n", (w) => number(Object.values(w.lanes).reduce((all, one) => all + one.in_flight, 0))],
      ["Longest", "n", (w) => { const first = Object.values(w.lanes).map((one) => one.holds_since).filter(Boolean).sort()[0]; return first ? span(since(first)) : "–"; }],
      ["Lanes", "", (w) => Object.entries(w.lanes).map(([name, one]) => `${name}${one.held ? ` (${one.held})` : ""}`).join(", ")],
    ], page.items, "No worker has called lately. Start one: postrider worker")));
}
