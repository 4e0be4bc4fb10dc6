// A receiver that holds no secret: verifies `v1a` (ed25519) signatures with Node's own crypto and the public key.
//
//     WEBHOOK_PUBLIC_KEY=whpk_… node receiver-ed25519.mjs 8000

import { createPublicKey, verify } from "node:crypto";
import { createServer } from "node:http";

const raw = Buffer.from(process.env.WEBHOOK_PUBLIC_KEY.replace(/^whpk_/, ""), "base64");
// The fixed beginning of an ed25519 key in DER.
const der = Buffer.concat([Buffer.from("302a300506032b6570032100", "hex"), raw]);
const key = createPublicKey({ key: der, format: "der", type: "spki" });

function isGenuine(headers, body) {
  const { "webhook-id": id, "webhook-timestamp": timestamp, "webhook-signature": signatures } = headers;
  if (Math.abs(Date.now() / 1000 - Number(timestamp)) > 300) return false;
  const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
  return signatures.split(" ").some((one) => {
    const [version, signature] = one.split(",");
    return version === "v1a" && verify(null, signed, key, Buffer.from(signature, "base64"));
  });
}

createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const genuine = isGenuine(request.headers, Buffer.concat(chunks));
  console.log(genuine ? "handled" : "refused:", request.headers["webhook-id"]);
  response.writeHead(genuine ? 204 : 400).end();
}).listen(Number(process.argv[2]), "127.0.0.1");
