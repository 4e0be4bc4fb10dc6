// A webhook receiver in Node: verifies with the official `standardwebhooks` package, and handles each event once.
//
//     npm install standardwebhooks
//     WEBHOOK_SECRET=whsec_… node receiver.mjs 8000

import { createServer } from "node:http";
import { Webhook } from "standardwebhooks";

const webhook = new Webhook(process.env.WEBHOOK_SECRET);
// Where your own data is: what is remembered and what is done about it must be one transaction.
const handled = new Set();

createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const body = Buffer.concat(chunks);
  try {
    // Exactly the bytes that came, before anybody parses them.
    webhook.verify(body, request.headers);
  } catch (problem) {
    console.log("refused:", problem.message);
    response.writeHead(400).end();
    return;
  }
  const id = request.headers["webhook-id"];
  console.log(handled.has(id) ? "again" : "handled", id); // your work goes here
  handled.add(id);
  response.writeHead(204).end();
}).listen(Number(process.argv[2]), "127.0.0.1");
