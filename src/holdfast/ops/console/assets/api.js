// Requests to `/v1`, the session of this browser, and the chosen universe.

import { setServerTime } from "./dom.js";

export const session = { required: false, token: null, scopes: [], csrf: null, version: null, trace_url: null };
export const place = { universe: "", universes: [] };

const listeners = new Set();

// Call the listener after each change of the session.
export function onSession(listener) {
  listeners.add(listener);
}

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail ?? document.title ?? `status ${status}`);
    this.status = status;
    this.code = document.code ?? "";
    this.retryable = Boolean(document.retryable);
  }
}

// Integers above 2^53 stay exact, but for times.
export function parseJson(text) {
  return JSON.parse(text, (name, value, context) => {
    if (typeof value !== "number" || !Number.isInteger(value) || Number.isSafeInteger(value)) return value;
    if (name.endsWith("_ns") || name === "since" || name === "until" || !context?.source) return value;
    return /^-?\d+$/.test(context.source) ? BigInt(context.source) : value;
  });
}

export function query(parameters) {
  const set = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  if (place.universe) set.push(["universe", place.universe]);
  return set.length ? `?${new URLSearchParams(set)}` : "";
}

async function send(url, options = {}) {
  let response;
  try {
    response = await fetch(url, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { code: "no_server", detail: "the server does not answer", retryable: true });
  }
  setServerTime(response.headers.get("date"));
  const text = await response.text();
  let document = {};
  try {
    document = text ? parseJson(text) : {};
  } catch {
    document = { detail: `the server sent no JSON (status ${response.status})` };
  }
  if (response.ok) return document;
  if (response.status === 401 && session.token !== null) {
    session.token = null;
    session.scopes = [];
    listeners.forEach((listener) => listener());
  }
  throw new Problem(response.status, document);
}

// `route` is the path below `/v1/`, with its parts encoded.
export function get(route, parameters = {}, signal = undefined) {
  return send(`/v1/${route}${query(parameters)}`, { signal });
}

function headers(key) {
  const all = { "Content-Type": "application/json" };
  if (session.csrf) all["X-Holdfast-CSRF"] = session.csrf;
  if (key) all["Idempotency-Key"] = key;
  return all;
}

export function newKey() {
  return `console-${crypto.randomUUID ? crypto.randomUUID() : [...crypto.getRandomValues(new Uint32Array(4))].join("-")}`;
}

// A repeat with the same key is the same request. `body` is an object, or JSON text.
export function post(route, body = {}, key = newKey()) {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  return send(`/v1/${route}${query({})}`, { method: "POST", headers: headers(key), body: text });
}

export function may(scope) {
  return session.scopes.includes(scope) || (scope === "read" && session.scopes.includes("operate"));
}

function applySession(document) {
  Object.assign(session, document);
  listeners.forEach((listener) => listener());
}

export async function loadSession() {
  applySession(await send("/v1/session"));
}

export async function signIn(token) {
  applySession(await send("/v1/session", {
    method: "POST", headers: headers(""), body: JSON.stringify({ token }),
  }));
}

export async function signOut() {
  applySession(await send("/v1/session/end", { method: "POST", headers: headers(""), body: "{}" }));
}

export async function loadUniverses() {
  place.universes = (await send("/v1/universes")).items;
  const names = place.universes.map((one) => one.universe);
  if (!names.includes(place.universe)) {
    const withApp = place.universes.find((one) => one.has_app);
    place.universe = (withApp ?? place.universes[0])?.universe ?? "";
  }
}
