// The action that sends an event: a form from the schema of its type.

import { get } from "./api.js";
import { action } from "./parts.js";

// The scalar types of JSON Schema with their inputs. Other types are written as JSON.
const INPUTS = { integer: "number", number: "number", string: "text", boolean: "boolean" };

function resolve(schema, root) {
  let found = schema;
  for (let hops = 0; found?.$ref && hops < 10; hops += 1) found = root.$defs?.[found.$ref.split("/").at(-1)];
  return found ?? {};
}

function fieldOf(name, property, root, required) {
  let schema = resolve(property, root);
  const choices = (schema.anyOf ?? []).map((one) => resolve(one, root)).filter((one) => one.type !== "null");
  const fallback = property.default;
  if (choices.length === 1) [schema] = choices;
  const known = schema.enum ? "enum" : INPUTS[schema.type] ?? "json";
  const initial = fallback === undefined || fallback === null ? "" : known === "json" ? JSON.stringify(fallback) : String(fallback);
  const hint = [schema.type ?? "JSON", fallback === undefined ? (required ? "required" : null) : "empty: the default"].filter(Boolean).join(", ");
  if (known === "enum" || known === "boolean") {
    const options = (schema.enum ?? ["true", "false"]).map(String);
    return { name: `field ${name}`, label: name, options: required ? options : ["", ...options], value: initial, hint, kind: known, schema };
  }
  return { name: `field ${name}`, label: name, type: known, value: initial, hint, kind: known, schema, required: required && known === "number" };
}

function fieldsOf(type) {
  if (!type?.fields) return [{ name: "event", label: "Fields (JSON)", type: "json", value: "{}" }];
  const shape = resolve(type.fields, type.fields);
  const required = new Set(shape.required ?? []);
  return Object.entries(shape.properties ?? {}).map(([name, property]) => fieldOf(name, property, type.fields, required.has(name)));
}

// A field as JSON text; null leaves it to its default.
function jsonOf(field, value, isRequired) {
  if (field.kind === "text" || (field.kind === "enum" && typeof field.schema.enum[0] === "string")) {
    return value === "" && !isRequired ? null : JSON.stringify(value);
  }
  return value === "" ? null : value;
}

function eventText(types, values) {
  const type = types.get(values.type);
  if (!type?.fields) return values.event || "{}";
  const shape = resolve(type.fields, type.fields);
  const parts = fieldsOf(type).flatMap((field) => {
    const text = jsonOf(field, values[field.name] ?? "", (shape.required ?? []).includes(field.label));
    return text === null ? [] : [`${JSON.stringify(field.label)}:${text}`];
  });
  return `{${parts.join(",")}}`;
}

// `route` is that of a world or a flow. `awaited` are the types to offer first.
export function sendAction({ route, command, disabled = false, awaited = () => [] }) {
  let types = new Map();
  const initial = () => awaited().find((one) => types.has(one)) ?? types.keys().next().value ?? "";
  return action({
    label: "Send event", scope: "submit", disabled, route: () => `${route}/send`,
    async prepare() {
      // A server without the code of the app knows no types.
      const page = await get(`${route}/event-types`).catch(() => ({ items: [] }));
      types = new Map(page.items.map((one) => [one.type, one]));
    },
    fields: () => [
      types.size
        ? { name: "type", label: "Type of the event", options: [...types.keys()], value: initial(), decides: true }
        : { name: "type", label: "Type of the event", required: true },
      { name: "key", label: "Key (optional)", hint: "a repeat with this key is not handled twice" },
    ],
    more: (values) => fieldsOf(types.get(values.type)),
    body: (values) => `{"type":${JSON.stringify(values.type)},"event":${eventText(types, values)}${values.key ? `,"key":${JSON.stringify(values.key)}` : ""}}`,
    command: (values) => command(values, eventText(types, values)),
  });
}
