"""A webhook receiver in Python: verifies with the official `standardwebhooks` package, and handles each event once.

    pip install standardwebhooks
    WEBHOOK_SECRET=whsec_… python receiver.py 8000
"""

import os
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from standardwebhooks import Webhook, WebhookVerificationError

webhook = Webhook(os.environ["WEBHOOK_SECRET"])
# Where your own data is: what is remembered and what is done about it must be one transaction.
database = sqlite3.connect(os.environ.get("DATABASE", ":memory:"))
database.execute("CREATE TABLE IF NOT EXISTS handled (webhook_id TEXT PRIMARY KEY)")


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            # Exactly the bytes that came, before anybody parses them.
            event = webhook.verify(body, dict(self.headers.items()))
        except WebhookVerificationError as problem:
            return self.answer(400, f"refused: {problem}")
        with database:
            cursor = database.execute("INSERT OR IGNORE INTO handled VALUES (?)", [self.headers["webhook-id"]])
            if cursor.rowcount == 1:
                print("handled", self.headers["webhook-id"], event, flush=True)  # your work goes here
            else:
                print("again", self.headers["webhook-id"], flush=True)
        self.answer(204)

    def answer(self, status, told=""):
        if told:
            print(told, flush=True)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
