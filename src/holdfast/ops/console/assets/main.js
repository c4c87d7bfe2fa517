// The frame of the console: sign-in, navigation, universe, and the page of the present address.

import { get, loadSession, loadUniverses, may, onSession, place, session, signIn, signOut } from "./api.js";
import { h, nowMs, replace, setServerTime, updateTimes } from "./dom.js";
import { Live } from "./live.js";
import { announce } from "./parts.js";
import { address, parse } from "./router.js";
import { PAGES, TITLES } from "./pages.js";

const root = document.getElementById("console");
const THEMES = ["auto", "light", "dark"];
let shown = null;
let frame = null;
let turn = 0;

function theme(next) {
  const chosen = next ?? localStorage.getItem("holdfast-theme") ?? "auto";
  localStorage.setItem("holdfast-theme", chosen);
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  return chosen;
}

function themeButton() {
  const button = h("button", { type: "button", class: "small" });
  const label = () => {
    button.textContent = `Theme: ${theme()}`;
  };
  button.addEventListener("click", () => {
    theme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    label();
  });
  label();
  return button;
}

function showSignIn(problemText = "") {
  leave();
  live.close();
  frame = null;
  const problem = h("p", { class: "problem", role: "alert" }, problemText);
  const input = h("input", { type: "password", name: "token", autocomplete: "off", required: true, "aria-label": "Token" });
  const form = h("form", {
    class: "sign-in", method: "post", onsubmit: async (event) => {
      event.preventDefault();
      problem.textContent = "";
      try {
        const token = input.value;
        input.value = "";
        await signIn(token);
        await start();
      } catch (error) {
        problem.textContent = error.status === 401 ? "This token is not valid." : error.message;
        input.focus();
      }
    },
  },
  h("h1", {}, "Holdfast"),
  h("p", {}, "This server needs a token. The browser keeps it as a cookie for 12 hours at most."),
  h("label", {}, h("span", {}, "Token"), input),
  problem,
  h("button", { type: "submit", class: "primary" }, "Sign in"));
  replace(root, h("main", { class: "narrow" }, form));
  input.focus();
}

function buildFrame() {
  const state = h("span", { class: "live waiting", role: "status" }, "connecting");
  const nav = h("nav", { "aria-label": "Pages" });
  const main = h("main", { id: "main", tabindex: -1 });
  const universe = h("select", { "aria-label": "Universe", onchange: () => {
    place.universe = universe.value;
    window.location.hash = address("now");
  } });
  const who = h("span", { class: "who" });
  replace(root,
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "Skip to the page"),
    h("header", {}, h("a", { class: "brand", href: "#/" }, "Holdfast"), universe, state, h("span", { class: "space" }), who, themeButton()),
    h("div", { class: "columns" }, nav, main),
    h("div", { id: "announcements", class: "hidden", role: "status", "aria-live": "polite" }));
  frame = { state, nav, main, universe, who };
  showLive(liveState);
}

let liveState = "waiting";

function showLive(next) {
  liveState = next;
  if (!frame) return;
  const texts = { live: "live", waiting: "connecting", lost: "no connection" };
  frame.state.className = `live ${next}`;
  if (frame.state.textContent !== texts[next]) frame.state.textContent = texts[next];
}

const live = new Live((state) => {
  const wasLost = liveState !== "live";
  showLive(state);
  if (state === "live" && wasLost) shown?.page.refresh?.();
}, async (subject) => {
  try {
    // An ended session shows here: the stream itself has no status.
    await get("readiness");
  } catch {
    return false;
  }
  return subject !== "";
});

function leave() {
  document.querySelectorAll("dialog").forEach((dialog) => dialog.close());
  shown?.page.close?.();
  shown = null;
}

// Ask for a refresh of lists at most once a second.
let refreshTimer = null;

function onEvent(name, document) {
  if (name === "readiness" && document.at_ns) setServerTime(new Date(Number(document.at_ns) / 1e6).toUTCString());
  if (!shown) return;
  shown.page.event?.(name, document);
  if (name !== "readiness" && refreshTimer === null) {
    refreshTimer = setTimeout(() => {
      refreshTimer = null;
      shown?.page.refresh?.();
    }, 700);
  }
}

async function route() {
  turn += 1;
  const mine = turn;
  if (session.required && session.token === null) return showSignIn();
  if (!may("read")) return showSignIn(`The token ${session.token} has no scope read.`);
  const at = parse(window.location.hash);
  if (at.universe && at.universe !== place.universe) {
    place.universe = at.universe;
    try {
      await loadUniverses();
    } catch (error) {
      showLive("lost");
    }
    if (mine !== turn) return;
  }
  if (!frame) buildFrame();
  leave();
  if (at.universe && place.universe !== at.universe) {
    live.close();
    replace(frame.main, h("h1", { tabindex: -1 }, "No such universe"), h("p", { class: "problem" }, `This store has no universe ${at.universe}.`),
      h("p", {}, h("a", { href: address("now") }, `Universe ${place.universe}`)));
    return;
  }
  const known = Object.hasOwn(PAGES, at.page) ? at.page : "now";
  const { universe, who, nav, main } = frame;
  replace(universe, place.universes.map((one) => h("option", { value: one.universe }, one.universe)));
  universe.value = place.universe;
  replace(who, session.required ? [session.token, " (", session.scopes.join(", "), ") ", h("button", { type: "button", class: "small", onclick: leaveSession }, "Sign out")] : "no token needed");
  replace(nav, h("ul", {}, Object.entries(TITLES).map(([name, title]) => h("li", {},
    h("a", { href: address(name), "aria-current": name === section(known) ? "page" : null }, title)))));
  const page = PAGES[known](at.parts, at.filters);
  shown = { page };
  document.title = `${page.title} · Holdfast`;
  replace(main, page.node);
  main.querySelector("h1")?.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  live.open(page.subject ?? "", onEvent);
}

function section(page) {
  return { tasks: "work", flows: "work" }[page] ?? page;
}

async function leaveSession() {
  try {
    await signOut();
    showSignIn();
  } catch (error) {
    announce(error.message);
  }
}

async function start() {
  try {
    await loadSession();
    if (session.token !== null && may("read")) {
      place.universe = parse(window.location.hash).universe;
      await loadUniverses();
    }
    await route();
  } catch (error) {
    if (error.status === 401) return showSignIn();
    replace(root, h("main", { class: "narrow" }, h("p", { class: "problem", role: "alert" }, error.message),
      h("button", { type: "button", onclick: start }, "Try again")));
    setTimeout(() => frame ?? start(), 3_000);
  }
}

onSession(() => {
  if (session.required && session.token === null && frame) showSignIn("The session has ended.");
});
window.addEventListener("hashchange", route);
setInterval(updateTimes, 1_000);
// No event tells of a change of these pages.
setInterval(() => shown?.page.polls && !document.hidden && shown.page.refresh(), 3_000);
theme();
start();
