// Addresses: `#/universe/page/part/…?filters`. Every view has one.

import { place } from "./api.js";

export function address(page, parts = [], filters = {}) {
  const path = [place.universe || "-", page, ...parts].map((part) => encodeURIComponent(part)).join("/");
  const set = Object.entries(filters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#/${path}${set.length ? `?${new URLSearchParams(set)}` : ""}`;
}

export function parse(hash) {
  const [path, filters] = hash.replace(/^#\/?/, "").split("?", 2);
  let parts;
  try {
    parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    parts = [];
  }
  const [universe = "", page = "now", ...rest] = parts;
  return { universe: universe === "-" ? "" : universe, page, parts: rest, filters: Object.fromEntries(new URLSearchParams(filters ?? "")) };
}

// The type and the name of a world's path. The name may contain slashes.
export function worldParts(id) {
  const slash = id.indexOf("/");
  return [id.slice(0, slash), id.slice(slash + 1)];
}

export function go(page, parts = [], filters = {}) {
  window.location.hash = address(page, parts, filters);
}

// Replace the filters of this address without a new entry in the history.
export function setFilters(filters) {
  const { page, parts } = parse(window.location.hash);
  window.history.replaceState(null, "", address(page, parts, filters));
}
