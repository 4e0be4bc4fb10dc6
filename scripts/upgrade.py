"""Two versions on one database: `upgrade.py OLD NEW DATABASE…` with two binaries; scripts/upgrade.sh builds them and brings the
servers. Processes of the old version deliver while the new one migrates and delivers beside them. What they leave is judged by
a receiver's book and the rows alone. Exits with 1 if a promise was broken."""

import base64
import collections
import hashlib
import hmac
import http.client
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.parse

LEASE_SEC = 3
# How long the old version works alone, beside the new one, and with nothing to do.
ALONE_SEC, TOGETHER_SEC, QUIET_SEC = 5, 10, 3
# Nothing here takes this long unless it hangs.
PATIENCE_SEC = 60

CONFIG = """\
[outbox]
lock_lease_sec = {lease}
poll_interval_sec = 0.1
concurrency = 8
batch = 16
max_attempts = 12
max_crashes = 50
backoff_sec = [1]
drain_timeout_sec = 5
[lane.work]
courier = "http"
url = "{receiver}/work"
timeout_ms = 10000
[lane.held]
courier = "http"
url = "{receiver}/held"
[lane.doomed]
courier = "http"
url = "{receiver}/doomed"
[lane.webhooks]
lock_lease_sec = {lease}
[lane.orders]
lock_lease_sec = {lease}
backoff_sec = [1]
[orders]
adapter = "http"
url = "{receiver}/orders"
idempotency = "key"
timeout_ms = 10000
[webhooks]
allow_http = true
allow_cidrs = ["127.0.0.0/8"]
base_delay_sec = 0.5
max_retry_limit = 12
[alerts]
url = "{receiver}/alerts"
every = "1s"
"""


class Broken(Exception):
    """The run cannot go on."""


def until(what, holds, seconds=PATIENCE_SEC):
    end = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > end:
            raise Broken(f"waited {seconds} s in vain until {what}")
        time.sleep(0.1)
    return found


def ask(address, method, path, body=b"", headers=None):
    """Status and JSON of one request; 0 and the reason where there was no answer."""
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text[:1] in b"{[" else {}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, {"error": {"code": type(error).__name__}}
    finally:
        connection.close()


# ---- the receiver ----

Request = collections.namedtuple("Request", "at path id token key webhook timestamp signature body status")


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps a book of all requests, in the order in which they came."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.book, self.lock, self.seen = [], threading.Lock(), collections.Counter()
        self.is_down = True
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path, body):
        """Status and how long it takes. Some fail once, some take their time, so that there is always something under way."""
        nth = self.seen[path, body]
        self.seen[path, body] += 1
        n = int((re.search(rb"\d+", body) or [b"1"])[0])
        match path:
            case "/doomed":
                return 422, 0
            case "/down" if self.is_down:
                return 503, 0
            case "/work":
                return (503 if n % 17 == 0 and nth == 0 else 200), (0.4 if n % 10 == 3 else 0.02)
            case "/hooks" | "/moved" | "/orders":
                return (503 if n % 4 == 0 and nth == 0 else 200), (0.4 if n % 10 == 3 else 0.02)
        return 200, 0

    def handle_error(self, *_):
        pass  # whoever is killed in the middle of a request is no news


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        of, server = self.headers.get, self.server
        with server.lock:
            status, after = server.answer(self.path, body)
            server.book.append(Request(
                time.monotonic(), self.path, int(of("postrider-message-id", 0)), int(of("postrider-lease-token", 0)),
                of("idempotency-key", ""), of("webhook-id", ""), of("webhook-timestamp", ""), of("webhook-signature", ""),
                body, status))
        time.sleep(after)
        said = b'{"order_ref":"r","fills":[{"px":1,"qty":1,"ts":"t"}]}' if self.path == "/orders" else b""
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_):
        pass


# ---- databases, by clients the product knows nothing of ----

class Sqlite:
    def __init__(self, folder):
        self.path = folder / "upgrade.db"
        self.url = f"sqlite://{self.path}"

    def rows(self, sql):
        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=20)
        try:
            return [["" if value is None else str(value) for value in row] for row in connection.execute(sql)]
        finally:
            connection.close()

    def snapshot(self):
        tables = {"schema": self.rows("SELECT type, name, sql FROM sqlite_master ORDER BY type, name")}
        for kind, name, _ in tables["schema"]:
            if kind == "table":
                tables[name] = sorted(self.rows(f'SELECT * FROM "{name}"'))
        return tables

    def drop(self):
        pass  # the folder goes


class Server:
    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        self.name = f"upgrade_{os.getpid()}"
        self.server, self.url = parts, parts._replace(path=f"/{self.name}").geturl()
        self.admin(f"DROP DATABASE IF EXISTS {self.name}")
        self.admin(f"CREATE DATABASE {self.name}")

    def client(self, words, environment=None):
        ended = subprocess.run(words, capture_output=True, timeout=PATIENCE_SEC, env={**os.environ, **(environment or {})})
        if ended.returncode:
            raise Broken(f"{words[0]}: {ended.stderr.decode(errors='replace').strip()}")
        return ended.stdout.decode(errors="surrogateescape").splitlines()

    def rows(self, sql):
        return [line.split("\t") for line in self.run(self.url, sql)]

    def snapshot(self):
        tables = {"schema": [row for sql in self.SCHEMA for row in self.rows(sql)]}
        for [name] in self.rows(self.TABLES):
            tables[name] = sorted(self.run(self.url, self.ALL.format(name)))
        return tables


class Postgres(Server):
    TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    ALL = 'COPY "{}" TO STDOUT'
    SCHEMA = [
        "SELECT table_schema, table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns"
        " WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY 1, 2, 3",
        "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1",
        "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1",
        "SELECT proname, md5(prosrc) FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1, 2",
    ]

    def run(self, url, sql):
        return self.client(["psql", "-X", "-q", "-A", "-t", "-F", "\t", "-d", url, "-c", sql])

    def admin(self, sql):
        self.run(self.server.geturl(), sql)

    def drop(self):
        self.admin(f"DROP DATABASE IF EXISTS {self.name} WITH (FORCE)")


class Mysql(Server):
    TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE'"
    ALL = "SELECT * FROM `{}`"
    SCHEMA = [
        "SELECT table_name, column_name, column_type, is_nullable, column_default FROM information_schema.columns"
        " WHERE table_schema = DATABASE() ORDER BY 1, 2",
        "SELECT table_name, index_name, seq_in_index, column_name, non_unique FROM information_schema.statistics"
        " WHERE table_schema = DATABASE() ORDER BY 1, 2, 3",
        "SELECT trigger_name, MD5(action_statement) FROM information_schema.triggers WHERE trigger_schema = DATABASE() ORDER BY 1",
        "SELECT routine_name, MD5(routine_definition) FROM information_schema.routines WHERE routine_schema = DATABASE() ORDER BY 1",
    ]

    def run(self, url, sql):
        parts = urllib.parse.urlsplit(url)
        program = shutil.which("mariadb") or shutil.which("mysql") or "mariadb"
        words = [program, "--protocol=tcp", "-h", parts.hostname, "-P", str(parts.port or 3306), "-u", parts.username or "root"]
        name = [parts.path.strip("/")] if parts.path.strip("/") else []
        password = {"MYSQL_PWD": parts.password} if parts.password else {}
        return self.client([*words, "-N", "-B", *name, "-e", sql], password)

    def admin(self, sql):
        self.run(self.server._replace(path="").geturl(), sql)

    def drop(self):
        self.admin(f"DROP DATABASE IF EXISTS {self.name}")


def database(kind, folder):
    if kind == "sqlite":
        return Sqlite(folder)
    variable, server = {"postgres": ("POSTRIDER_TEST_POSTGRES", Postgres), "mysql": ("POSTRIDER_TEST_MYSQL", Mysql)}[kind]
    if not os.environ.get(variable):
        raise Broken(f"{variable} is not set: run `make upgrade`")
    return server(os.environ[variable])


# ---- processes ----

class Home:
    """A folder with a configuration of its own, as on a host of its own, for processes of one version."""

    everybody = []

    def __init__(self, root, name, binary, url, config):
        self.folder, self.name, self.binary = root / name.replace(" ", "-"), name, binary
        self.folder.mkdir()
        (self.folder / "postrider.toml").write_text(config)
        ours = ("OUTBOX_", "POSTRIDER_", "GATEWAY_", "POSTGRES_DSN", "RUST_LOG")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.environment["POSTRIDER_DATABASE"] = url
        self.process = None
        Home.everybody.append(self)

    def start(self, *args):
        with open(self.folder / "stdout", "w") as out, open(self.folder / "stderr", "a") as log:
            self.process = subprocess.Popen(
                [self.binary, *args], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
        return self

    def serve(self):
        self.start("serve", "--listen", "127.0.0.1:0")
        self.address = until(f"{self.name} listens", self.listening, 20)
        return self

    def listening(self):
        if self.process.poll() is not None:
            raise Broken(f"{self.name} ended with {self.process.returncode}: {self.log()[-1000:]}")
        found = re.search(r"://(\S+)", (self.folder / "stdout").read_text())
        return found and found[1]

    def run(self, *args, seconds=PATIENCE_SEC):
        """Code and what was printed, of a command that ends by itself."""
        try:
            ended = subprocess.run(
                [self.binary, *args], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired as late:
            return None, (late.stdout or b"").decode(errors="replace").strip()
        return ended.returncode, ended.stdout.decode(errors="replace").strip()

    def stop(self):
        """The code after a SIGTERM; None if it did not heed it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self):
        self.process.kill()
        self.process.wait()

    def is_alive(self):
        return self.process.poll() is None

    def log(self):
        log = self.folder / "stderr"
        return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace")) if log.exists() else ""

    def cpu_sec(self):
        words = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    @classmethod
    def end_all(cls):
        for home in cls.everybody:
            if home.process and home.is_alive():
                home.kill()
        cls.everybody.clear()


def complaints(log):
    """Warnings and errors by their words, with how often each came."""
    lines = [line for line in log.splitlines() if re.search(r"\b(WARN|ERROR)\b|^error:|panicked", line)]
    words = [re.sub(r"^\S+Z\s+", "", re.sub(r"\d+", "N", re.sub(r"\d{4}-\S+Z", "", line))).strip() for line in lines]
    return collections.Counter(words)


# ---- producers ----

Wish = collections.namedtuple("Wish", "name path headers body twice")


class Producer(threading.Thread):
    """Asks for things over HTTP without pause, at any server there is, some at both, and again where it was refused."""

    def __init__(self, what, servers, every_sec, burst, make):
        super().__init__(daemon=True)
        self.what, self.servers, self.every_sec, self.burst, self.make = what, servers, every_sec, burst, make
        self.wishes, self.told, self.undone = {}, collections.defaultdict(list), []
        self.refused, self.n, self.stopped = collections.Counter(), 0, threading.Event()
        self.after = {}

    def run(self):
        while not self.stopped.wait(self.every_sec):
            for _ in range(self.burst):
                self.n += 1
                wish = self.make(self.n)
                self.wishes[wish.name] = wish
                servers = random.sample(self.servers, len(self.servers))
                for server in servers if wish.twice else servers[:1]:
                    self.send(wish, server)
            again, self.undone = self.undone, []
            for wish in again:
                self.send(wish, random.choice(self.servers))

    def send(self, wish, server):
        status, answer = ask(server.address, "POST", wish.path, wish.body, wish.headers)
        if 200 <= status < 300:
            self.told[wish.name].append(answer)
            self.after.setdefault(wish.name, time.monotonic())
            return True
        code = (answer.get("error") or {}).get("code") if isinstance(answer.get("error"), dict) else answer.get("code")
        self.refused[server.name, status, code or answer.get("error_code")] += 1
        self.undone.append(wish)
        return False

    def finish(self, server):
        """What was refused is asked for once more; nothing may be left."""
        for _ in range(20):
            again, self.undone = self.undone, []
            if not again:
                return
            for wish in again:
                self.send(wish, server)
            if self.undone:
                time.sleep(0.5)


def message(lane, letter, twice=lambda n: n % 5 == 0, headers=None):
    def make(n):
        name = f"{letter}-{n}"
        key = {"idempotency-key": name} if headers is None else headers(name)
        return Wish(name, f"/v1/outbox/{lane}", key, json.dumps({"n": n, "of": letter}).encode(), twice(n))
    return make


def event(kind, letter):
    def make(n):
        payload = {"n": n, "of": letter}
        body = json.dumps({"event_type": f"{kind}.made", "external_id": f"{letter}-{n}", "payload": payload}).encode()
        return Wish(f"{letter}-{n}", "/v1/events", {}, body, n % 5 == 0)
    return make


def order(n):
    body = {"instrument": "AAPL", "side": "BUY", "qty": n, "time_in_force": "IOC"}
    return Wish(f"o-{n}", "/do/order", {"idempotency-key": f"o-{n}"}, json.dumps(body).encode(), n % 3 == 0)


# ---- the meeting ----

class Meeting:
    def __init__(self, kind, old, new, root):
        self.kind, self.wrong, self.notes = kind, [], []
        self.receiver = Receiver()
        self.db = database(kind, root)
        config = CONFIG.format(receiver=self.receiver.url(), lease=LEASE_SEC)

        def home(name):
            return Home(root, name, new if name.startswith("new") else old, self.db.url, config)

        names = ["old serve", "old worker", "old victim", "old again", "new serve", "new worker", "new tool"]
        self.homes = {name: home(name) for name in names}
        self.killed_at = []

    def claim(self, holds, what):
        if not holds:
            self.wrong.append(what)

    def api(self, name, method, path, body=None, wanted=range(200, 300)):
        status, answer = ask(self.homes[name].address, method, path, b"" if body is None else json.dumps(body).encode())
        if status not in wanted:
            raise Broken(f"{name}: {method} {path} answered {status} {answer}")
        return answer

    def number(self, sql):
        return int(self.db.rows(sql)[0][0] or 0)

    # -- the steps --

    def old_alone(self):
        h = self.homes
        code, said = h["old worker"].run("migrate")
        if code != 0:
            raise Broken(f"the old migrate ended with {code}: {said}")
        h["old serve"].serve()
        self.subscriptions = {}
        wishes = {
            "hooks": {"event_types": ["work.*"]},
            "down": {"event_types": ["down.*"], "max_retry_limit": 30, "retry_schedule_sec": [4]},
            "paused": {"event_types": ["paused.*"]},
        }
        for name, wish in wishes.items():
            made = self.api("old serve", "POST", "/v1/subscriptions", {"url": f"{self.receiver.url()}/{name}", **wish})
            self.subscriptions[name] = made
        key = h["old serve"].folder / "postrider.key"
        for home in h.values():
            if home is not h["old serve"]:
                shutil.copy(key, home.folder)
        self.api("old serve", "POST", f"/v1/subscriptions/{self.subscriptions['paused']['id']}/pause")
        self.api("old serve", "POST", "/v1/lanes/held/pause")
        for name in ("worker", "victim"):
            h[f"old {name}"].start("worker", "--worker-id", f"old-{name}")

        self.servers = [h["old serve"]]
        late = {"postrider-delay": f"{ALONE_SEC + TOGETHER_SEC}s"}
        once = {
            "late": Producer("late", self.servers, 0, 1, message("work", "l", headers=lambda name: {"idempotency-key": name, **late})),
            "doomed": Producer("doomed", self.servers, 0, 1, message("doomed", "d")),
            "down": Producer("down", self.servers, 0, 1, event("down", "x")),
            "parked": Producer("parked", self.servers, 0, 1, event("paused", "p")),
        }
        for producer, count in zip(once.values(), (20, 5, 2, 5)):
            for n in range(1, count + 1):
                wish = producer.make(n)
                producer.wishes[wish.name] = wish
                producer.send(wish, h["old serve"])
        both = lambda _: True
        active = lambda name: {"postrider-active-key": name}
        self.producers = {
            **once,
            "work": Producer("work", self.servers, 0.5, 40, message("work", "w")),
            "held": Producer("held", self.servers, 0.3, 1, message("held", "h")),
            "active": Producer("active", self.servers, 0.2, 1, message("held", "a", twice=both, headers=active)),
            "events": Producer("events", self.servers, 0.2, 2, event("work", "e")),
            "orders": Producer("orders", self.servers, 0.2, 1, order),
        }
        self.running = [self.producers[name] for name in ("work", "held", "active", "events", "orders")]
        for producer in self.running:
            producer.start()
        time.sleep(ALONE_SEC)
        until("the doomed are dead", lambda: self.number("SELECT count(*) FROM outbox_done WHERE lane = 'doomed'") == 5)
        waiting = "SELECT count(*) FROM webhook_delivery_sagas WHERE status = 'PendingRetry'"
        until("a delivery waits for its retry", lambda: self.number(waiting) > 0)

    def migrate(self):
        self.mark = self.number("SELECT max(id) FROM outbox")
        self.words_before = {name: len(self.homes[name].log()) for name in ("old serve", "old worker", "old victim")}
        begun = time.monotonic()
        code, said = self.homes["new tool"].run("migrate")
        self.migrated_at = time.monotonic()
        self.migration_sec = self.migrated_at - begun
        self.claim(code == 0, f"migrate beside running processes of the old version ended with {code}: {said}")
        for _ in range(3):
            if code == 0:
                return
            time.sleep(1)
            code, said = self.homes["new tool"].run("migrate")
        raise Broken(f"migrate cannot be carried out: {said}")

    def together(self):
        h = self.homes
        h["new serve"].serve()
        h["new worker"].start("worker", "--worker-id", "new-worker")
        self.servers.append(h["new serve"])
        end = time.monotonic() + TOGETHER_SEC
        time.sleep(TOGETHER_SEC / 4)
        self.kill_victim()
        # A change by each of them must be noticed by the other.
        self.api("new serve", "POST", f"/v1/subscriptions/{self.subscriptions['paused']['id']}/resume")
        if h["old serve"].is_alive():
            self.moved_at = None
            status, answer = ask(
                h["old serve"].address, "PATCH", f"/v1/subscriptions/{self.subscriptions['hooks']['id']}",
                json.dumps({"url": f"{self.receiver.url()}/moved"}).encode())
            if status == 200:
                self.moved_at = time.monotonic()
            else:
                self.notes.append(f"the old server does not change a subscription any more: {status} {answer}")
        time.sleep(max(0, end - time.monotonic()))
        for producer in self.running:
            producer.stopped.set()
        for producer in self.running:
            producer.join(PATIENCE_SEC)
        self.receiver.is_down = False

    def kill_victim(self):
        victim = self.homes["old victim"]
        if not victim.is_alive():
            return
        held = "SELECT count(*) FROM outbox WHERE locked_by LIKE 'old-victim:%'"
        end = time.monotonic() + 2
        while time.monotonic() < end and not self.number(held):
            pass
        victim.kill()
        self.killed_at.append(time.monotonic())
        self.left_behind = self.number(held)

    def quiet(self):
        """Nothing to do but wait: who is busy now is busy with itself."""
        old = [self.homes[name] for name in ("old serve", "old worker")]
        time.sleep(LEASE_SEC)
        before = {home.name: (home.cpu_sec(), len(home.log().splitlines())) for home in old if home.is_alive()}
        time.sleep(QUIET_SEC)
        for home in old:
            if home.name not in before or not home.is_alive():
                continue
            cpu, lines = before[home.name]
            share = (home.cpu_sec() - cpu) / QUIET_SEC
            said = len(home.log().splitlines()) - lines
            self.claim(share < 0.5, f"{home.name} spins: {share:.0%} of a core with nothing to do")
            self.claim(said <= 20 * QUIET_SEC, f"{home.name} wrote {said} lines in {QUIET_SEC} s with nothing to do")

    def old_ends(self):
        """What each of the old ones did after the migration, and how it ended."""
        done = collections.Counter()
        sql = f"SELECT locked_by, count(*) FROM outbox_done WHERE lane = 'work' AND id > {self.mark} GROUP BY locked_by"
        for holder, count in self.db.rows(sql):
            done[holder.rsplit(":", 2)[1]] += int(count)
        self.table = []
        for name in ("old serve", "old worker", "old victim", "new serve", "new worker"):
            home = self.homes[name]
            was_alive = home.is_alive()
            delivered = done[str(home.process.pid)]
            words = complaints(home.log()[self.words_before.get(name, 0):])
            ended = "killed" if name == "old victim" and self.killed_at else None
            if ended is None:
                code = home.stop() if was_alive else home.process.returncode
                ended = f"stopped, code {code}" if was_alive else f"ended by itself, code {code}"
                self.claim(was_alive or words, f"{name} ended by itself ({code}) and did not say why")
                self.claim(not was_alive or code == 0, f"{name} did not end well after SIGTERM: code {code}")
            self.claim(delivered > 0 or words, f"{name} delivered nothing after the migration and did not say why")
            self.claim(not any("panicked" in line for line in words), f"{name} panicked: {[w for w in words if 'panicked' in w]}")
            self.table.append((name, delivered, ended, words))

    def old_again(self):
        """The old version, started on the new schema, refuses and changes nothing."""
        before, self.refusals = self.db.snapshot(), {}
        home = self.homes["old again"]
        commands = [
            ("worker",), ("worker", "--once"), ("serve", "--listen", "127.0.0.1:0"), ("migrate",),
            ("enqueue", "work", "--payload", "x"), ("webhooks", "publish", "work.made", "--payload", "1"),
        ]
        for command in commands:
            code, said = home.run(*command, seconds=20)
            last = said.splitlines()[-1] if said else ""
            self.refusals[" ".join(command)] = (code, last)
            shown = "went on working" if code is None else f"ended with {code}"
            self.claim(code == 2, f"the old `{' '.join(command)}`, started on the new schema, {shown}: {last}")
            self.claim("newer" in said, f"the old `{' '.join(command)}` does not say that the schema is newer: {last}")
        after = self.db.snapshot()
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        self.claim(not changed, f"the old version, started on the new schema, changed {', '.join(sorted(changed))}")

    def drain(self):
        h = self.homes
        h["new serve"].serve()
        h["new worker"].start("worker", "--worker-id", "new-worker")
        for producer in self.producers.values():
            producer.finish(h["new serve"])
            left = {wish.name for wish in producer.undone}
            self.claim(not left, f"{len(left)} of {producer.what} are refused for good: {dict(producer.refused)}")
        dead = self.db.rows("SELECT id FROM outbox_done WHERE lane = 'doomed' ORDER BY id LIMIT 1")[0][0]
        self.api("new serve", "POST", f"/v1/outbox/{dead}/requeue")
        self.api("new serve", "POST", "/v1/lanes/held/resume")
        open_rows = {
            "live messages": "SELECT count(*) FROM outbox",
            "open deliveries": "SELECT count(*) FROM webhook_delivery_sagas WHERE status NOT IN ('Completed', 'DeadLettered')",
            "results not applied": "SELECT count(*) FROM webhook_results",
            "orders in progress": "SELECT count(*) FROM idempo_ledger WHERE status = 'in_progress'",
        }
        begun = time.monotonic()
        left = {}

        def is_drained():
            left.update({name: self.number(sql) for name, sql in open_rows.items()})
            return not any(left.values())

        try:
            until("everything has ended", is_drained)
        except Broken:
            self.wrong.append(f"{PATIENCE_SEC} s after the old version has gone there are still {left}")
        self.drain_sec = time.monotonic() - begun
        try:
            until("the doctor finds nothing", lambda: h["new tool"].run("doctor")[0] == 0, 20)
            self.doctor = "finds nothing"
        except Broken:
            code, said = h["new tool"].run("doctor")
            self.doctor = "finds something"
            self.wrong.append(f"the doctor ends with {code}: {said}")
        for name in ("new serve", "new worker"):
            code = h[name].stop()
            self.claim(code == 0, f"{name} did not end well after SIGTERM: code {code}")

    # -- the judge --

    def judge(self):
        with self.receiver.lock:
            book = list(self.receiver.book)
        self.judge_requests(book)
        self.judge_messages(book)
        self.judge_orders(book)
        self.judge_events(book)

    def first(self, what, of, shown=str):
        """One line for many of a kind."""
        if of:
            more = f" and {len(of) - 3} more" if len(of) > 3 else ""
            self.wrong.append(f"{what}: {', '.join(shown(one) for one in list(of)[:3])}{more}")

    def judge_requests(self, book):
        """Each claim's request goes out once, and later claims of a message have higher tokens."""
        seen, last, keys = set(), {}, {}
        twice, fell, strange = [], [], []
        for request in book:
            if not request.id or request.webhook:
                continue
            place = (request.path, request.id)
            if (*place, request.token) in seen:
                twice.append((*place, request.token))
            seen.add((*place, request.token))
            if request.token <= last.get(place, 0):
                fell.append((*place, last[place], request.token))
            last[place] = max(request.token, last.get(place, 0))
            if request.path != "/orders" and keys.setdefault(place, request.key) != request.key:
                strange.append(place)
        self.first("went out twice under one token (path, message, token)", twice)
        self.first("went out under a token that is not higher than the last (path, message, last, this)", fell)
        self.first("went out under two Idempotency-Keys (path, message)", strange)

    def judge_messages(self, book):
        lanes = "('work', 'held', 'doomed', 'orders')"
        columns = "id, lease_token, attempts, crashes"
        live = self.db.rows(f"SELECT {columns}, 'live' FROM outbox WHERE lane IN {lanes}")
        done = self.db.rows(f"SELECT {columns}, status FROM outbox_done WHERE lane IN {lanes}")
        state, tokens = {}, {}
        for id, token, _, _, status in live + done:
            self.claim(int(id) not in state, f"message {id} is in two places at once")
            state[int(id)], tokens[int(id)] = status, int(token)
        self.steps = collections.defaultdict(list)
        for id, token, kind in self.db.rows("SELECT outbox_id, lease_token, kind FROM outbox_attempts"):
            self.steps[int(id)].append((int(token), kind))
        column = "`key`" if self.kind == "mysql" else "key"
        keys = dict(self.db.rows(f"SELECT {column}, outbox_id FROM outbox_keys WHERE lane IN {lanes}"))

        accepted, lost, several, misnamed = {}, [], [], []
        for name in ("work", "late", "held", "active", "doomed"):
            producer = self.producers[name]
            for wish, answers in producer.told.items():
                ids = sorted({answer["id"] for answer in answers})
                if len(ids) > 1:
                    several.append((wish, ids))
                for id in ids:
                    accepted[id] = producer.wishes[wish].body
                lost.extend(id for id in ids if id not in state)
                if name != "active" and keys.get(wish) != str(ids[0]):
                    misnamed.append((wish, ids[0], keys.get(wish)))
        self.first("one key, several messages (an active key's while the first of them was still live)", several)
        self.first("accepted and nowhere (message)", lost)
        self.first("a key that does not name its message (key, message, named)", misnamed)
        self.first("there and asked for by nobody (message)",
                   [id for id, *_ in self.db.rows("SELECT id FROM outbox_done WHERE lane IN ('work', 'held', 'doomed')")
                    if int(id) not in accepted])

        paths = ("/work", "/held", "/doomed")
        taken, bodies, late = collections.Counter(), [], []
        for request in book:
            if request.path in paths:
                taken[request.id] += request.status == 200
                if accepted.get(request.id) != request.body:
                    bodies.append(request.id)
                if request.token > tokens.get(request.id, 0):
                    late.append((request.id, request.token, tokens.get(request.id)))
        self.first("arrived with another body than it was given (message)", bodies)
        self.first("went out under a token beyond its last (message, token, last)", late)
        doomed = {answer["id"] for answers in self.producers["doomed"].told.values() for answer in answers}
        self.first("was never delivered (message)", [id for id in accepted if id not in doomed and not taken[id]])
        self.first("is called sent and no receiver took it (message)",
                   [id for id in accepted if state.get(id) == "sent" and not taken[id]])
        self.first("is not sent (message, state)", [(id, state.get(id)) for id in accepted if id not in doomed and state.get(id) != "sent"])
        duplicates = [id for id in accepted if taken[id] > 1]
        self.first("was taken more often than it was lost or failed (message, taken, steps)",
                   [(id, taken[id], self.steps[id]) for id in duplicates if len(self.steps[id]) + 1 < taken[id]])
        outcomes = collections.Counter((id, token) for id, steps in self.steps.items() for token, kind in steps if kind != "takeover")
        for id, status in state.items():
            if status == "sent":
                outcomes[id, tokens[id]] += 1
        self.first("has two outcomes under one token (message, token)", [claim for claim, n in outcomes.items() if n > 1])
        self.accepted, self.duplicates = len(accepted), len(duplicates)
        self.takeovers = sum(kind == "takeover" for steps in self.steps.values() for _, kind in steps)

    def judge_orders(self, book):
        producer = self.producers["orders"]
        ledger = dict(self.db.rows("SELECT idempotency_key, status FROM idempo_ledger"))
        messages = collections.Counter()
        for table in ("outbox", "outbox_done"):
            for [key] in self.db.rows(f"SELECT active_key FROM {table} WHERE lane = 'orders'"):
                messages[key] += 1
        taken, other = collections.Counter(), []
        by_key = {key: producer.wishes[key].body for key in producer.told}
        for request in book:
            if request.path == "/orders":
                taken[request.key] += request.status == 200
                wanted = json.loads(by_key.get(request.key, b"{}"))
                if json.loads(request.body).get("qty") != wanted.get("qty"):
                    other.append(request.key)
        self.first("an order that has not succeeded (key, ledger)",
                   [(key, ledger.get(key)) for key in producer.told if ledger.get(key) != "succeeded"])
        self.first("an order with more than one message (key)", [key for key, n in messages.items() if n != 1])
        self.first("an order the broker never took (key)", [key for key in producer.told if not taken[key]])
        self.first("an order that arrived as another (key)", other)
        self.orders, self.orders_twice = len(producer.told), sum(n > 1 for n in taken.values())
        ids = dict(self.db.rows("SELECT active_key, id FROM outbox_done WHERE lane = 'orders'"))
        self.first("an order was sent more often than it was lost or failed (key, taken)",
                   [(key, n) for key, n in taken.items() if len(self.steps[int(ids.get(key, 0))]) + 1 < n])

    def judge_events(self, book):
        sagas = {int(id): (int(event), int(subscription), status, int(count)) for id, event, subscription, status, count in self.db.rows(
            "SELECT id, event_id, subscription_id, status, attempt_count FROM webhook_delivery_sagas")}
        attempts = collections.defaultdict(list)
        for saga, n, is_success in self.db.rows(
                "SELECT saga_id, attempt, CASE WHEN error_code IS NULL THEN 1 ELSE 0 END FROM webhook_attempts"):
            attempts[int(saga)].append((int(n), is_success == "1"))
        letters = collections.Counter(int(saga) for [saga] in self.db.rows("SELECT saga_id FROM dead_letters"))
        arrived, unsigned = collections.defaultdict(list), []
        secrets = {name: made["secret"] for name, made in self.subscriptions.items()}
        secrets["moved"] = secrets["hooks"]
        for request in book:
            if request.webhook:
                arrived[request.path.strip("/"), request.body].append(request)
                signed = b".".join([request.webhook.encode(), request.timestamp.encode(), request.body])
                key = base64.b64decode(secrets[request.path.strip("/")].removeprefix("whsec_"))
                mac = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
                if f"v1,{mac}" not in request.signature.split():
                    unsigned.append(request.webhook)
        self.first("a webhook with a wrong signature (id)", unsigned)

        self.events, self.events_twice = 0, 0
        several, unmade, not_ended, unheard, early, twice, uncounted = [], [], [], [], [], [], []
        for name, place in (("events", "hooks"), ("down", "down"), ("parked", "paused")):
            producer, subscription = self.producers[name], self.subscriptions[place]["id"]
            for wish, answers in producer.told.items():
                self.events += 1
                ids = {answer["event_id"] for answer in answers}
                if len(ids) > 1:
                    several.append(wish)
                of_event = [id for id, saga in sagas.items() if saga[0] in ids and saga[1] == subscription]
                if len(of_event) != 1:
                    unmade.append((wish, of_event))
                    continue
                _, _, status, counted = sagas[of_event[0]]
                tried = attempts[of_event[0]]
                if status != "Completed":
                    not_ended.append((wish, status))
                if sum(success for _, success in tried) != 1 or max(n for n, _ in tried or [(0, 0)]) != counted or letters[of_event[0]]:
                    uncounted.append((wish, counted, tried))
                body = json.dumps(json.loads(producer.wishes[wish].body)["payload"]).encode()
                requests = sorted(arrived[place, body] + (arrived["moved", body] if place == "hooks" else []))
                taken = [request for request in requests if request.status == 200]
                if not taken:
                    unheard.append(wish)
                if place == "hooks" and self.moved_at and producer.after[wish] > self.moved_at + 2 and arrived["hooks", body]:
                    early.append(wish)
                if len(taken) > 1:
                    self.events_twice += 1
                    # Who was killed had sent it a moment before, and it waited for the end of the lease.
                    if not any(taken[0].at < at + 1 and taken[1].at > at for at in self.killed_at):
                        twice.append((wish, [round(request.at - self.migrated_at, 2) for request in taken]))
        self.first("an event that was published twice (external id)", several)
        self.first("an event without exactly one delivery (external id, deliveries)", unmade)
        self.first("a delivery that has not been completed (external id, status)", not_ended)
        self.first("a delivery whose attempts do not agree (external id, counted, attempts)", uncounted)
        self.first("an event that never arrived as it was given (external id)", unheard)
        self.first("an event sent to a URL that had been changed two seconds before (external id)", early)
        self.first("an event taken twice, with nobody killed between (external id, seconds after the migration)", twice)

    # -- and all of it --

    def take_place(self):
        for step in (self.old_alone, self.migrate, self.together, self.quiet, self.old_ends, self.old_again, self.drain, self.judge):
            begun = time.monotonic()
            step()
            print(f"{self.kind}: {step.__name__} {time.monotonic() - begun:.1f} s", file=sys.stderr)

    def show(self):
        lines = [f"{self.kind}: migrated in {self.migration_sec:.2f} s beside three processes of the old version"]
        lines.append(f"  {'process':12} {'delivered after it':>18}  {'end':24} complaints")
        for name, delivered, ended, words in self.table:
            lines.append(f"  {name:12} {delivered:18}  {ended:24} {sum(words.values())}")
            for line, count in words.most_common(4):
                lines.append(f"      {count} × {line[:200]}")
        refused = sum((producer.refused for producer in self.producers.values()), collections.Counter())
        for (server, status, code), count in sorted(refused.items(), key=str):
            lines.append(f"  {server} refused {count} requests: {status} {code}")
        (code, said), = set(self.refusals.values()) if len(set(self.refusals.values())) == 1 else [(None, str(self.refusals))]
        lines.append(f"  started again: {'code ' + str(code) if code is not None else 'not all the same'}, {said}")
        lines.append(f"  messages {self.accepted}, more than once {self.duplicates}; takeovers {self.takeovers}, left behind by the kill {self.left_behind}")
        lines.append(f"  events {self.events}, more than once {self.events_twice}; orders {self.orders}, more than once {self.orders_twice}")
        lines.append(f"  drained in {self.drain_sec:.1f} s; the doctor {self.doctor}")
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def meet(kind, old, new):
    root = pathlib.Path(tempfile.mkdtemp(prefix="postrider-upgrade-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    meeting = None
    try:
        meeting = Meeting(kind, old, new, root)
        try:
            meeting.take_place()
            print(meeting.show())
        except Broken as broken:
            meeting.wrong.append(f"{broken}")
            for home in meeting.homes.values():
                tail = home.log().splitlines()[-5:]
                print(*[f"{home.name}: {line}" for line in tail], sep="\n", file=sys.stderr)
        for what in meeting.wrong:
            print(f"  WRONG: {what}")
        return not meeting.wrong
    finally:
        Home.end_all()
        if meeting:
            meeting.receiver.shutdown()
            meeting.db.drop()
        if os.environ.get("KEEP"):
            print(f"kept: {root}", file=sys.stderr)
        else:
            shutil.rmtree(root, ignore_errors=True)


def main(old, new, *kinds):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    random.seed(1)
    results = {}
    for kind in kinds:
        try:
            results[kind] = meet(kind, old, new)
        except Exception:  # the other databases are looked at all the same
            traceback.print_exc()
            results[kind] = False
        sys.stdout.flush()
    wrong = [kind for kind, is_right in results.items() if not is_right]
    if wrong:
        sys.exit(f"two versions do not get on with each other: {', '.join(wrong)}")


main(*sys.argv[1:])
