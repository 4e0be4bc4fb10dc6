// Talking to the server: requests, who is signed in, and the stream of samples.

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(method, path, body) {
  const options = { method, headers: {}, credentials: "same-origin" };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Refused(0, "UNREACHABLE", "The server does not answer.");
  }
  const text = await response.text();
  let json = null;
  try {
    json = text ? JSON.parse(text) : null;
  } catch {
    // Not JSON: the status says enough.
  }
  // The gate answers 503 with what it found.
  if (response.ok || (path.startsWith("/health") && json?.capabilities)) return json;
  const error = json?.error;
  const code = typeof error === "string" ? error : (error?.code ?? String(response.status));
  const message = (typeof error === "string" ? json.message : error?.message) ?? `The server answered ${response.status}.`;
  if (response.status === 401) document.dispatchEvent(new CustomEvent("signed-out"));
  throw new Refused(response.status, code, message);
}

export const get = (path) => ask("GET", path);
export const post = (path, body) => ask("POST", path, body ?? {});
export const send = (method, path, body) => ask(method, path, body);

export function query(path, values) {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const session = { signed_in: false, name: null, scopes: [], lane: null, lanes: [], spaces: [], tokens_required: false };
export const may = (scope) => session.scopes.includes(scope);

export async function whoAmI() {
  Object.assign(session, await get("/v1/session"));
}

// ---- samples ----

const KEPT_MS = 15 * 60 * 1000;
export const past = [];
const listeners = new Set();
let source = null;
let silence = 0;

export function onSample(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(linked) {
  document.dispatchEvent(new CustomEvent("link", { detail: linked }));
}

function take(sample) {
  past.push(sample);
  while (past.length && past[0].at_ms < sample.at_ms - KEPT_MS) past.shift();
  for (const listener of listeners) listener(sample);
}

export async function watch() {
  const overview = await get("/v1/overview");
  past.splice(0, past.length, ...overview.samples);
  connect();
  return overview;
}

function connect() {
  stop();
  source = new EventSource("/v1/live");
  source.addEventListener("sample", (event) => {
    hush();
    tell(true);
    take(JSON.parse(event.data));
  });
  source.addEventListener("error", () => {
    // A stream lasts a minute, and the next begins at once: no word of it.
    // One that does not come back is told of, however often the browser tries.
    silence ||= setTimeout(() => tell(false), 2500);
    // The browser tries again by itself unless the answer was a refusal.
    if (source && source.readyState === EventSource.CLOSED) {
      setTimeout(async () => {
        if (!source) return;
        try {
          await whoAmI();
          if (!session.signed_in) return document.dispatchEvent(new CustomEvent("signed-out"));
          connect();
        } catch {
          if (source) source.dispatchEvent(new Event("error"));
        }
      }, 3000);
    }
  });
}

function hush() {
  clearTimeout(silence);
  silence = 0;
}

export function stop() {
  hush();
  source?.close();
  source = null;
}

// A hidden page asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (!source && !document.hidden && stopped) {
    stopped = false;
    // With what was missed meanwhile.
    watch().catch(() => connect());
  } else if (source && document.hidden) {
    stop();
    stopped = true;
  }
});
let stopped = false;
