// The overview: how fast, how deep, how old; per lane, live.

import { may, onSample, past, post } from "./api.js";
import { chart } from "./charts.js";
import { attempt, badge, button, confirm, fill, h, number, pressed, rate, span, table, tiles } from "./parts.js";

const NONE = { sent_per_second: 0, retries_per_second: 0, dead_per_second: 0, pending: 0, leased: 0, oldest_due_seconds: 0, paused: false };

function total(sample, lane) {
  const lanes = lane ? [sample.lanes[lane] ?? NONE] : Object.values(sample.lanes);
  const sum = (name) => lanes.reduce((all, one) => all + one[name], 0);
  return {
    sent: sum("sent_per_second"), retries: sum("retries_per_second"), dead: sum("dead_per_second"),
    pending: sum("pending"), leased: sum("leased"), oldest: Math.max(0, ...lanes.map((one) => one.oldest_due_seconds)),
  };
}

export function overview(main, { lane }) {
  const of = (name) => (sample) => total(sample, lane)[name];
  const rates = chart("Outcomes a second", "/s", [
    { name: "sent", kind: "sent", of: of("sent") }, { name: "retried", kind: "retry", of: of("retries") }, { name: "dead", kind: "dead", of: of("dead") },
  ]);
  const depth = chart("Pending", "", [{ name: "pending messages", kind: "depth", of: of("pending") }]);
  const age = chart("Oldest due message", " s", [{ name: "age", kind: "age", of: of("oldest") }]);
  const notes = h("div", {});
  const numbers = h("div", {});
  const lanes = h("div", { class: "card" });
  main.append(
    h("div", { class: "head" }, h("h1", {}, lane ? `Lane ${lane}` : "Overview"), lane ? h("a", { href: "#/" }, "All lanes") : null, lane ? h("a", { href: `#/messages?lane=${encodeURIComponent(lane)}` }, "Its messages") : null),
    notes, numbers, h("div", { class: "charts" }, rates.element, depth.element, age.element), lane ? "" : lanes,
  );

  const hold = (name, paused) => button(paused ? "Resume" : "Pause", { id: `hold-${name}`, allowed: may("operate") }, async () => {
    if (!paused && !(await confirm({ title: `Pause the lane ${name}?`, text: "Workers stop claiming from it within about a second. Its messages wait and none is lost.", action: "Pause" }))) return;
    await attempt(() => post(`/v1/lanes/${encodeURIComponent(name)}/${paused ? "resume" : "pause"}`), paused ? `Lane ${name} goes on.` : `Lane ${name} is paused.`);
  });

  let shown = "", noted = "";
  function draw() {
    const sample = past.at(-1);
    if (!sample) return fill(numbers, h("p", { class: "hint" }, "Waiting for the first numbers…"));
    const now = total(sample, lane);
    // A stale sample only repeats what was known.
    const known = past.filter((one) => !one.stale);
    const recent = known.slice(-30).map((one) => total(one, lane));
    const average = (name) => recent.reduce((all, one) => all + one[name], 0) / Math.max(recent.length, 1);
    const ended = average("sent") + average("dead") + average("retries");
    const success = ended > 0 ? `${((100 * average("sent")) / ended).toFixed(1)}` : "–";
    const counted = sample.at_ms - sample.counted_at_ms > 5000 ? `counted ${span((sample.at_ms - sample.counted_at_ms) / 1000)} ago` : "";
    fill(numbers, tiles([
      ["Sent a second", rate(now.sent)], ["Pending", number(now.pending), counted], ["Leased", number(now.leased)],
      ["Oldest due", span(now.oldest), "", now.oldest > 60 ? "bad" : ""], ["Success", success, success === "–" ? "" : "%"],
      ["Dead a second", rate(now.dead), "", now.dead > 0 ? "bad" : ""], ["Workers", number(sample.workers), "", sample.workers ? "" : "bad"],
    ]));
    const told = [sample.stale, sample.openmemory, sample.workers === 0].join();
    // What has not changed is not read out again.
    if (told !== noted) fill(notes,
      sample.stale ? h("p", { class: "note bad", role: "alert" }, "The database does not answer. What is shown is from before.") : null,
      sample.openmemory === "failed" ? h("p", { class: "note" }, "OpenMemory is away: memories are deferred. ", h("a", { href: "#/memories" }, "See memories")) : null,
      sample.workers === 0 && !sample.stale ? h("p", { class: "note" }, "No worker has called lately. Start one: ", h("code", {}, "postrider worker")) : null);
    noted = told;
    for (const one of [rates, depth, age]) one.draw(known);
    if (lane || pressed) return;
    const rows = Object.entries(sample.lanes);
    const now_shown = JSON.stringify(rows);
    if (now_shown === shown) return;
    shown = now_shown;
    fill(lanes, h("h2", {}, "Lanes"), table("Lanes", [
      ["Lane", "", ([name]) => h("a", { href: `#/lane/${encodeURIComponent(name)}`, id: `lane-${name}` }, name)],
      ["State", "", ([, one]) => badge(one.paused ? "paused" : "open", one.paused ? "warn" : "good")],
      ["Pending", "n", ([, one]) => number(one.pending)], ["Leased", "n", ([, one]) => number(one.leased)],
      ["Oldest due", "n", ([, one]) => span(one.oldest_due_seconds)], ["Sent /s", "n", ([, one]) => rate(one.sent_per_second)],
      ["Retried /s", "n", ([, one]) => rate(one.retries_per_second)], ["Dead /s", "n", ([, one]) => rate(one.dead_per_second)],
      ["", "", ([name, one]) => hold(name, one.paused)],
    ], rows, "No lane yet."));
  }
  draw();
  return onSample(draw);
}
