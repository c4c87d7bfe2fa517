// Starts a flow, waits for its end and prints its result:  node start_flow.js URL TOKEN
import createClient from "openapi-fetch";
import type { paths } from "./schema.js";

declare const process: { argv: string[] };

const [url, token] = process.argv.slice(2);
const client = createClient<paths>({
  baseUrl: url,
  headers: { Authorization: `Bearer ${token}` },
});

const started = await client.POST("/v1/flows", {
  params: { header: { "Idempotency-Key": "invoice-7" } },
  body: { name: "total", kwargs: { numbers: [1, 2, 3] } },
});
if (started.data === undefined) throw new Error(started.error.detail);

const path = { id: started.data.id };
for (;;) {
  const shown = await client.GET("/v1/flows/{id}", { params: { path } });
  if (shown.data === undefined) throw new Error(shown.error.detail);
  const { state, error, result } = shown.data;
  if (state === "COMPLETED") {
    console.log(JSON.stringify({ id: path.id, result }));
    break;
  }
  if (error !== null) throw new Error(error);
  await new Promise((resolve) => setTimeout(resolve, 100));
}
