// The page: state, form and views joined; questions go to Python, answers come back and are shown.
import { firstWorker } from "./boot.js";
import { h, notes } from "./dom.js";
import { Dropped, Engine } from "./engine.js";
import { copy, savePng, saveSvg, saveText, tablesToCsv } from "./exports.js";
import { fetchHub, listDropped, readFiles } from "./files.js";
import { Form } from "./form.js";
import { choose, LANGUAGES, list, load, says, sayWork, t, translatePage } from "./i18n.js";
import { add, bytes, count as shorten, exact, flops, percent, short } from "./numbers.js";
import { LETTERS, makeState, read, VIEWS, write } from "./state.js";
import * as conventions from "./views/conventions.js";
import * as curves from "./views/curves.js";
import * as flopsView from "./views/flops.js";
import * as memory from "./views/memory.js";
import * as plan from "./views/plan.js";
import * as roofline from "./views/roofline.js";
import * as serving from "./views/serving.js";
import * as time from "./views/time.js";

const PLACES = { flops: flopsView, curves, memory, time, roofline, plan, serving, conventions };
const PLAN_PAUSE_MS = 500;
const COLUMN_WIDTH = 320; // pixels that a set-up beside others needs

const find = (id) => document.getElementById(id);
const quick = new Engine((kind, reason) => onStatus(kind, reason), firstWorker); // counts: always answers at once
const slow = new Engine((kind, reason) => kind === "failed" && onStatus(kind, reason)); // seconds, bytes, plans
let data; // what the form offers
let state;
let form;
let counted = []; // the headline's answers, one for each set-up
let shown = []; // the answers of the view that `shownIn` names
let shownIn = "";
let failure = ""; // why Python did not start
let explanation = null; // the answer of `explain` for the box that is open
let round = 0; // grows with every change: what belongs to an older one is not shown
let isLive = false;

async function main() {
  const first = JSON.parse(find("default").textContent);
  quick.start();
  data = await fetch(new URL("./data.json", import.meta.url)).then((response) => response.json());
  const saved = await read(location.hash.slice(1), {}, data.form);
  state = saved ?? makeState(data.default.setup);
  // An address may name a view or a language alone: the default question is asked.
  const isDefault = !Object.keys(state.setups[0]).length;
  if (isDefault) state.setups[0] = { ...data.default.setup };
  if (!saved || isDefault) counted = [first];
  showTheme(localStorageGet("theme"));
  await load(choose(state.lang || localStorageGet("lang")));
  buildPage();
  render();
  if (failure) say(describe(), true);
  else if (!isLive) say(t(saved ? "status.starting" : "status.default"));
  await refresh();
}

function localStorageGet(key) {
  try {
    return localStorage.getItem(`flopcalc.${key}`) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

function localStorageSet(key, value) {
  try {
    localStorage.setItem(`flopcalc.${key}`, value);
  } catch {
    // the choice then lasts as long as the page
  }
}

// ---- words, theme and status -----------------------------------------------------------------------------------------

function say(text, isError = false) {
  const status = find("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}

// What went wrong, in the page's words. Why Python did not start is said once: in the headline, or here where that has a number.
function describe(error = null) {
  if (!failure) return error?.message ?? "";
  return counted.some(Boolean) || state.view === "serving" ? t("status.failed", { reason: failure }) : t("status.stopped");
}

function onStatus(kind, reason) {
  if (kind === "failed") {
    failure = reason;
    if (form) {
      say(describe(), true);
      renderHeadline();
      renderPanel();
    }
    return;
  }
  isLive = true;
  document.documentElement.dataset.python = "ready";
}

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  showTheme(isDark ? "light" : "dark");
  localStorageSet("theme", isDark ? "light" : "dark");
}

async function switchLanguage(language) {
  state.lang = language;
  localStorageSet("lang", language);
  await load(language);
  buildPage();
  if (document.documentElement.dataset.live && !find("status").classList.contains("error")) say(t("status.ready"));
  render();
  saveAddress();
}

// ---- the page's fixed parts ------------------------------------------------------------------------------------------

function buildPage() {
  translatePage();
  const chosen = document.documentElement.lang.slice(0, 2);
  find("language").replaceChildren(...Object.entries(LANGUAGES).map(([code, name]) =>
    h("option", { value: code, lang: code === "zh" ? "zh-Hans" : code, selected: code === chosen }, name)));
  form = new Form(find("form"), data, { onChange: change, onModel: chooseModel, onFiles: takeFiles, onHub: takeHub, onLaunch: takeLaunch });
  find("views").replaceChildren(...VIEWS.map((name) => h("button", {
    type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", "data-view": name, onclick: () => openView(name),
    onkeydown: (event) => moveTab(event, name),
  }, t(`view.${name}`))));
}

function moveTab(event, name) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const at = event.key === "Home" ? 0 : event.key === "End" ? VIEWS.length - 1
    : step ? (VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length : -1;
  if (at < 0) return;
  event.preventDefault();
  openView(VIEWS[at]);
  find(`tab-${VIEWS[at]}`).focus();
}

function listeners() {
  find("language").addEventListener("change", (event) => switchLanguage(event.target.value));
  find("theme").addEventListener("click", switchTheme);
  find("views").addEventListener("pointerover", () => slow.start(), { once: true }); // a view is about to be opened
  find("form").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", async () => {
    if (!data) return; // the page still starts, and reads the address then
    const found = await read(location.hash.slice(1), data.default.setup, data.form);
    if (!found || (await write(found)) === (await write(state))) return;
    const language = state.lang;
    form.leave();
    state = { ...found, active: 0 };
    counted = [];
    shown = [];
    if (state.lang && state.lang !== language) await switchLanguage(choose(state.lang));
    await refresh();
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", () => document.body.classList.remove("dragging"));
  addEventListener("drop", async (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    const { folder, files } = await listDropped(event.dataTransfer);
    await takeFiles(files, folder);
  });
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(find("panel").clientWidth - width) < 8) return;
    width = find("panel").clientWidth;
    if (state) renderPanel();
  }).observe(find("panel"));
}

// ---- inputs ----------------------------------------------------------------------------------------------------------

const active = () => state.setups[state.active];

function change(name, value) {
  const setup = active();
  const isEmpty = value === "" || value === false || (Array.isArray(value) && !value.length);
  if (isEmpty) delete setup[name];
  else setup[name] = value;
  // Each of these says the length by itself.
  const lengths = { text: ["seq", "lengths"], seq: ["text", "lengths"], lengths: ["seq", "text", "batch"] };
  if (!isEmpty) for (const other of lengths[name] ?? []) delete setup[other];
  refresh();
}

function chooseModel(value) {
  const setup = active();
  delete setup.files;
  setup.model = value;
  const byHub = data.presets.find((preset) => preset.hub_id === value);
  if (byHub) setup.model = byHub.name;
  // A diffusion model has sizes in pixels, every other a length.
  const preset = data.presets.find((each) => each.name === setup.model || each.aliases.includes(setup.model));
  if (preset?.type.endsWith("Pipeline")) delete setup.seq;
  else if (preset && !setup.text && !setup.lengths) setup.seq ||= data.default.setup.seq;
  refresh();
}

async function takeFiles(files, folder = "") {
  const found = await readFiles(files);
  const setup = active();
  if (Object.keys(found.configs).length) {
    setup.files = found.configs;
    if (folder) setup.model = folder;
    else delete setup.model;
    const names = Object.keys(found.configs);
    if (names.length > 1 && !folder) setup.model = "config";
  }
  if (found.images.length) setup.image = [...(setup.image ?? []), ...found.images];
  if (found.launch) await takeLaunch(...found.launch);
  else await refresh();
  if (found.problems.length) say(list(...found.problems), true);
}

async function takeHub(id) {
  if (!id) return;
  const known = data.presets.find((preset) => preset.hub_id === id);
  try {
    say(t("status.fetching", { id }));
    const configs = known ? null : await fetchHub(data.hub, id);
    const setup = active();
    if (known) delete setup.files;
    else setup.files = configs;
    setup.model = known ? known.name : id;
    say("");
    await refresh();
  } catch (error) {
    say(error.message, true);
  }
}

async function takeLaunch(name, text) {
  let answer;
  try {
    answer = await quick.ask("launch", { what: "launch", name, text, setup: active() });
  } catch (error) {
    if (!(error instanceof Dropped)) say(describe(error), true);
    return;
  }
  if (answer.error) {
    say(answer.error, true);
    return;
  }
  state.setups[state.active] = answer.setup;
  await refresh();
  say([t("status.launch", { name }), ...answer.notes].join(" "));
}

// ---- questions -------------------------------------------------------------------------------------------------------

function openView(name) {
  state.view = name;
  shown = [];
  refresh();
}

// Ask everything that the page shows for the present state; answers to older states are not shown.
async function refresh() {
  round += 1;
  const mine = round;
  explanation = null;
  if (counted.length !== state.setups.length) counted.length = state.setups.length;
  showForm();
  renderSetups();
  renderTabs();
  saveAddress();
  await Promise.all([askCounts(mine), askView(mine), askExplanation(mine)]);
}

// What was measured in a step and gives its MFU: the count does not depend on it.
const MEASURED = ["step_time", "tokens_per_second", "peak"];

// A step time without a device, or one that is no number, is said at its field; the count stands all the same.
async function count(setup, at) {
  const answer = await quick.ask(`count-${at}`, { what: "flops", setup });
  if (!answer.error || !MEASURED.some((name) => setup[name])) return answer;
  const rest = Object.fromEntries(Object.entries(setup).filter(([name]) => !MEASURED.includes(name)));
  const counted = await quick.ask(`count-${at}`, { what: "flops", setup: rest });
  return counted.error ? answer : { ...counted, problem: answer.error };
}

async function askCounts(mine) {
  await Promise.all(state.setups.map(async (setup, at) => {
    try {
      const answer = await count(setup, at);
      if (at >= state.setups.length) return; // it was removed meanwhile
      // A slider moves on while Python counts: what arrives is shown all the same, it is the newest there is.
      counted[at] = { ...answer, of: JSON.stringify(setup) };
      if (mine === round) settle();
      if (at === state.active) form.fit(state.view, answer);
      renderHeadline();
      if (state.view === "flops") renderPanel();
    } catch (error) {
      if (!(error instanceof Dropped)) say(describe(error), true);
    }
  }));
}

function settle() {
  say(t("status.ready"));
  document.documentElement.dataset.live = "true";
  if ("serviceWorker" in navigator && !settle.isDone) {
    settle.isDone = true;
    // Only now: filling the cache must not slow the first answer down.
    navigator.serviceWorker.register(new URL("./sw.js", import.meta.url)).catch(() => {});
  }
}

async function askExplanation(mine) {
  if (state.view !== "flops" || !state.op) return;
  try {
    const answers = await Promise.all(state.setups.map((setup, at) => quick.ask(`explain-${at}`, { what: "explain", setup, op: state.op })));
    if (mine !== round) return;
    explanation = answers;
    renderPanel();
  } catch (error) {
    if (!(error instanceof Dropped)) say(describe(error), true);
  }
}

// Fields that a view needs and a set-up lacks: the panel asks for them; nothing is chosen for the visitor.
const listMissing = () => (PLACES[state.view].needs?.(state) ?? []).filter((name) => state.setups.some((setup) => !setup[name]));

async function askView(mine) {
  const place = PLACES[state.view];
  const view = state.view;
  if (!place.channel || listMissing().length) {
    if (slow.current) slow.cancel();
    shown = [];
    find("panel").removeAttribute("aria-busy"); // of a view that was left before its answer came
    renderPanel();
    return;
  }
  const engine = place.isQuick?.(state) ? quick : slow;
  if (place.isLong) {
    engine.cancel();
    renderProgress(0, 0);
    await new Promise((resolve) => setTimeout(resolve, PLAN_PAUSE_MS));
    if (mine !== round) return;
  } else if (slow.current?.question.what === "plan") {
    slow.cancel(); // its layouts are for an older question, or for a view that is closed
  }
  find("panel").setAttribute("aria-busy", "true");
  if (!shown.length && !place.isLong) renderPanel(); // nothing of the view that was left
  try {
    const partial = [];
    const showPart = (at, found) => { // what is known already, where the rest of a view takes longer
      partial[at] = found;
      if (!place.isGradual || mine !== round || state.setups.some((_, each) => !partial[each])) return;
      shown = partial;
      shownIn = view;
      renderPanel();
    };
    const answers = await Promise.all(state.setups.map(async (setup, at) => {
      const found = {};
      for (const what of place.questions(setup, state)) {
        const progress = what === "plan" ? (done, whole) => mine === round && renderProgress(done, whole) : null;
        found[what] = await engine.ask(`${what}-${at}`, { what, setup, ...place.details?.(state) }, progress);
        showPart(at, found);
      }
      for (const [key, what, own] of place.listMore?.(found, setup) ?? []) found[key] = await engine.ask(`${key}-${at}`, { what, setup: own });
      return found;
    }));
    if (state.view !== view || answers.length !== state.setups.length) return;
    if (mine !== round && place.isLong) return;
    shown = answers;
    shownIn = view;
    if (mine === round) find("panel").removeAttribute("aria-busy");
    renderPanel();
  } catch (error) {
    if (!(error instanceof Dropped)) say(describe(error), true);
  }
}

let saving = 0;

function saveAddress() {
  clearTimeout(saving);
  saving = setTimeout(async () => {
    const text = await write(state);
    if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
    const names = state.setups.map((setup) => nameModel(setup)).join(" | ");
    document.title = `flopcalc: ${names}`;
  }, 120);
}

// ---- what is shown ---------------------------------------------------------------------------------------------------

function showForm() {
  form.show(active());
  form.fit(state.view, counted[state.active]);
}

function render() {
  showForm();
  renderSetups();
  renderTabs();
  renderHeadline();
  renderPanel();
}

const nameModel = (setup) => setup.model || Object.keys(setup.files ?? {})[0] || "";

function renderSetups() {
  const buttons = state.setups.map((setup, at) => h("button", {
    type: "button", "aria-pressed": String(at === state.active), "data-setup": LETTERS[at],
    onclick: () => { state.active = at; render(); },
  }, `${LETTERS[at]}: ${nameModel(setup) || "?"}`));
  const isOne = state.setups.length === 1;
  const change = (id, text, act) => h("button", { type: "button", id, class: "small", onclick: () => {
    act();
    shown = [];
    refresh();
  } }, text);
  const add = state.setups.length < LETTERS.length ? change("add-setup", t(isOne ? "setup.compare" : "setup.add"), () => {
    state.setups.push(structuredClone(active()));
    state.active = state.setups.length - 1;
  }) : null;
  const remove = isOne ? null : change("remove-setup", t("setup.remove", { letter: LETTERS[state.active || state.setups.length - 1] }), () => {
    const at = state.active || state.setups.length - 1; // the first goes last
    state.setups.splice(at, 1);
    counted.splice(at, 1);
    state.active = 0;
  });
  const focused = document.activeElement?.id;
  find("setups").replaceChildren(...(isOne ? [] : buttons), ...[add, remove].filter(Boolean));
  if (focused && find(focused)) find(focused).focus();
}

function renderTabs() {
  for (const button of find("views").children) {
    const isOpen = button.dataset.view === state.view;
    button.setAttribute("aria-selected", String(isOpen));
    button.tabIndex = isOpen ? 0 : -1;
  }
  find("panel").setAttribute("aria-labelledby", `tab-${state.view}`);
}

function renderHeadline() {
  const isOne = state.setups.length === 1;
  const root = find("headline");
  root.hidden = state.view === "serving"; // a server has no step: the view has its own number
  if (root.hidden) return;
  form.showError(null);
  const cards = state.setups.map((setup, at) => {
    const answer = counted[at];
    const name = `${isOne ? "" : `${LETTERS[at]}: `}${answer?.estimate?.model.name ?? setup.model ?? ""}`;
    return h("article", { class: "card" }, h("h2", {}, name),
      failure && !answer ? h("p", { class: "error", role: "alert" }, t("status.failed", { reason: failure }))
        : !answer ? h("p", {}, t("status.waiting"))
          : answer.error ? showProblem(answer.error, setup, at) : showCount(answer, at));
  });
  root.classList.toggle("two", !isOne);
  root.replaceChildren(...cards);
}

// The number for people first, the exact one beside it; then MFU, or what it takes to see one.
function showCount({ estimate, work, problem }, at) {
  const { workload, parameters, formats, mfu, hfu } = estimate;
  const total = estimate.flops.total;
  const first = counted[0]?.estimate;
  const facts = [
    parameters.total === parameters.trainable ? t("headline.trainable", { total: shorten(parameters.total) })
      : t("headline.parameters", { total: shorten(parameters.total), trainable: shorten(parameters.trainable) }),
    t("headline.weights", { size: bytes(add(...formats.weights.flatMap((each) => [each.bytes, each.scale_bytes]))), format: formats.weights.map((each) => each.format).join(" + ") }),
    t("headline.convention", { name: estimate.convention }),
    workload.visual_tokens ? t("headline.images", { images: exact(workload.images), tokens: exact(workload.visual_tokens), patches: exact(workload.patches) }) : "",
  ];
  const share = (name, value) => [h("strong", { class: "share", [`data-${name.toLowerCase()}`]: "" }, `${name} ${percent(value.value)}`), " "];
  const passes = ["forward", "backward", "recompute"].filter((name) => name === "forward" || estimate.flops[name]);
  return [
    h("p", { class: "answer" }, h("strong", { class: "figure" }, flops(total)), " ",
      h("span", { class: "exact" }, "= ", h("span", { "data-total": "" }, exact(total)), " FLOPs"),
      at && first ? [" ", h("span", { class: "minor exact" }, t("headline.ratio", { ratio: (Number(total) / Number(first.flops.total)).toFixed(3) }))] : null),
    h("p", { title: list(...passes.map((name) => `${t(`column.${name}`)} ${exact(estimate.flops[name])}`)) },
      says(sayWork(work), list(...passes.map((name) => `${t(`column.${name}`)} ${flops(estimate.flops[name])}`)))),
    problem ? showProblem(problem, state.setups[at], at, "headline.noMfu") : h("p", {}, mfu ? [share("MFU", mfu), share("HFU", hfu), h("span", { class: "minor" }, t("headline.peak", { peak: short(mfu.peak_flops_per_s, "FLOP/s"), device: mfu.device ?? "" }))]
      : h("button", { type: "button", class: "link", onclick: () => form.open(state.setups[at].device ? "step_time" : "device") }, t("headline.mfu"))),
    h("p", { class: "minor", title: `${t("column.parameters")} ${exact(parameters.total)}` }, facts.filter(Boolean).join(" · ")),
  ];
}

// An error stands once: at its field where it names one of the form's, else here.
function showProblem(error, setup, at, words = "headline.problem") {
  const named = form.findField(error);
  const isHub = !named && !setup.files && /^[\w.-]+\/[\w.-]+$/.test(setup.model ?? "");
  const field = isHub ? "model" : named;
  if (!field || at !== state.active) return h("p", { class: "error", role: "alert" }, form.reword(error));
  form.showError(field, isHub ? t("model.unknown", { id: setup.model }) : form.reword(error),
    isHub ? h("button", { type: "button", id: "fetch-model", onclick: () => takeHub(setup.model) }, t("model.fetchFrom", { host: new URL(data.hub).host })) : null);
  return h("p", {}, h("button", { type: "button", class: "link", onclick: () => form.open(field) }, t(words, { field: form.label(field) })));
}

function renderProgress(done, whole) {
  const bar = h("progress", { max: whole || 1, "aria-label": t("plan.progress") });
  if (whole) bar.value = done;
  const button = h("button", { type: "button", id: "cancel", onclick: () => {
    round += 1;
    slow.cancel();
    find("panel").removeAttribute("aria-busy");
    find("panel").replaceChildren(h("p", { role: "status" }, t("plan.cancelled")), h("button", { type: "button", id: "again", onclick: () => refresh() }, t("plan.again")));
  } }, t("plan.cancel"));
  const hadFocus = document.activeElement?.id === "cancel";
  find("panel").replaceChildren(h("div", { class: "progress" }, bar, h("span", {}, whole ? t("plan.done", { done: exact(done), whole: exact(whole) }) : t("plan.starting")), button));
  if (hadFocus) find("cancel").focus();
}

function renderPanel() {
  const panel = find("panel");
  const place = PLACES[state.view];
  const missing = listMissing();
  const answers = !place.channel ? counted : shownIn === state.view ? shown : [];
  const isWaiting = answers.length !== state.setups.length || [...answers].some((each) => !each);
  if (place.isLong && isWaiting && !missing.length && !failure) return; // its progress is shown
  if (missing.length || isWaiting || failure) {
    const wanted = missing.map((name) => form.makeCopy(name, (value) => {
      for (const setup of state.setups) setup[name] ||= value;
      refresh();
    }));
    panel.replaceChildren(...(place.controls?.(controlContext()) ?? []),
      missing.length ? h("section", { class: "missing" }, h("p", {}, t("missing", { view: t(`view.${state.view}`), fields: list(...missing.map((name) => form.label(name))) })), h("div", { class: "fields" }, wanted))
        : h("p", { class: "minor" }, failure ? t("status.none") : t("status.waiting")));
    return;
  }
  const problem = (answer) => (place.channel ? Object.entries(answer).find(([what, each]) => each.error && what !== "translate" && !what.includes("."))?.[1].error : answer.error);
  const many = state.setups.length;
  const most = Math.max(1, Math.min(place.isJoint ? 1 : many, Math.floor((panel.clientWidth + 24) / (COLUMN_WIDTH + 24))));
  const across = Math.ceil(many / Math.ceil(many / most)); // rows of about equal length
  const width = Math.max(300, Math.round((panel.clientWidth - 24 * (across - 1)) / across));
  const context = { state, width, onZoom: zoom, onView: openView, onOpen: openBox, explained, counted, names: state.setups.map((_, at) => nameSetup(at)), onField: setField, nameDevice: (id) => data.devices.find((each) => each.id === id)?.name ?? id, onOpenField: (name) => form.open(name), reword: (text) => form.reword(text), notes: (rows) => notes(rows?.map((each) => form.reword(each)), t("notes", { count: rows?.length })) };
  const good = answers.filter((answer) => !problem(answer));
  const rendered = good.length ? place.render(good, { ...context, letters: answers.flatMap((answer, at) => (problem(answer) ? [] : [LETTERS[at]])) }) : [];
  const focused = document.activeElement?.dataset?.path;
  const open = new Set([...panel.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  if (state.view === "serving") form.showError(null);
  const explain = (answer, at) => (state.view === "serving" ? showProblem(problem(answer), state.setups[at], at)
    : problem(answer) === counted[at]?.error ? h("p", { class: "minor" }, t("status.none"))
      : h("p", { class: "error", role: "alert" }, form.reword(problem(answer))));
  const columns = place.isJoint ? [h("article", { class: "column" }, good.length ? makeSave(good[0], 0) : null, rendered, answers.map((answer, at) => (problem(answer) ? [h("p", {}, nameSetup(at)), explain(answer, at)] : null)), good.length ? makeLines(good[0]) : null)]
    : answers.map((answer, at) => h("article", { class: "column", "aria-label": many > 1 ? LETTERS[at] : null },
      many > 1 ? h("h3", {}, nameSetup(at)) : null,
      problem(answer) ? explain(answer, at) : [makeSave(answer, at), rendered[good.indexOf(answer)], makeLines(answer)]));
  const grid = h("div", { class: `columns across-${across}` }, columns);
  panel.replaceChildren(...(place.controls?.(controlContext()) ?? []), ...(place.compare && good.length > 1 ? place.compare(good, { names: context.names.filter((_, at) => !problem(answers[at])) }) : []), grid);
  for (const each of panel.querySelectorAll("details > summary")) if (open.has(each.textContent)) each.parentElement.open = true;
  if (focused) [...panel.querySelectorAll("rect[data-path]")].find((each) => each.dataset.path === focused)?.focus();
}

const nameSetup = (at) => `${LETTERS[at]}: ${counted[at]?.estimate?.model.name ?? state.setups[at]?.model ?? ""}`;

// What a view's own choices change: names of the page's state.
const controlContext = () => ({ state, form, onChoose: (name, value) => {
  state[name] = value;
  shown = [];
  refresh();
} });

// A view's own choice of a field, for the set-up of a letter.
function setField(letter, name, value) {
  state.setups[LETTERS.indexOf(letter)][name] = value;
  refresh();
}

function zoom(path) {
  state.zoom = path;
  saveAddress();
  renderPanel();
}

function openBox(path) {
  state.op = state.op === path ? "" : path;
  explanation = null;
  saveAddress();
  renderPanel();
  askExplanation(round);
}

// The formula of the box that is open, as `flopcalc explain` writes it.
function explained(answer) {
  if (!state.op) return h("p", { class: "help" }, t("flops.help"));
  const found = explanation?.[counted.indexOf(answer)];
  const content = !found ? h("p", {}, t("status.waiting"))
    : found.error ? h("p", { class: "error" }, form.reword(found.error))
      : [found.operations.map((entry) => [h("h4", {}, `${entry.path}${entry.parameter && entry.parameter !== "weight" ? `.${entry.parameter}` : ""} (${entry.kind} × ${entry.count})`), h("pre", {}, entry.lines.join("\n"))]),
        h("p", { class: "minor" }, h("code", {}, found.lines.command))];
  return h("section", { class: "explained", "aria-live": "polite", "aria-label": t("flops.formula") }, content);
}

// ---- exports ---------------------------------------------------------------------------------------------------------

// The answer that a view's command and JSON belong to.
const findMain = (answer) => (!PLACES[state.view].channel ? answer : answer.translate && !answer.translate.error ? answer.translate : Object.values(answer)[0]);

// Above the picture: what a visitor takes along.
function makeSave(answer, at) {
  const main = findMain(answer);
  const name = `flopcalc-${state.view}${state.setups.length > 1 && !PLACES[state.view].isJoint ? `-${LETTERS[at]}` : ""}`;
  const column = (event) => event.target.closest("article");
  const picture = (event) => [column(event).querySelector("svg.treemap, svg.chart"), describePicture(at), [...column(event).querySelectorAll(".legend li")]];
  const hasPicture = state.view !== "conventions";
  const button = (label, onclick) => h("button", { type: "button", class: "small", onclick }, label);
  return h("section", { class: "save buttons", "aria-label": t("exports") },
      hasPicture ? [h("span", { class: "minor" }, t("exports.picture")), button("PNG", (event) => savePng(name, ...picture(event))), button("SVG", (event) => saveSvg(name, ...picture(event)))] : null,
      h("span", { class: "minor" }, t("exports.data")), button("CSV", async (event) => saveText(`${name}.csv`, (await askExport(at)).csv ?? tablesToCsv(column(event)), "text/csv")),
      button("JSON", async () => saveText(`${name}.json`, `${(await askExport(at)).json ?? main.json ?? JSON.stringify(main, null, 2)}\n`, "application/json")),
      button(t("exports.link"), async (event) => {
        const text = `${location.origin}${location.pathname}#${await write(state)}`;
        event.target.textContent = (await copy(text)) ? t("exports.copied") : t("exports.link");
      }));
}

// The same question elsewhere.
function makeLines(answer) {
  const main = findMain(answer);
  return h("section", { class: "exports", "aria-label": t("exports.command") },
    line(t("exports.command"), main.lines.command),
    main.lines.python ? line("Python", `from flopcalc import ${main.lines.python.split("(")[0]}\n${main.lines.python}`) : null);
}

// A picture's title: what it shows, of which model, in which step.
function describePicture(at) {
  const whole = PLACES[state.view].isJoint ? state.setups.map((_, each) => nameSetup(each)).join(" | ") : counted[at]?.estimate?.model.name ?? "";
  const answer = counted[at];
  return [says(t(`view.${state.view}`), whole), answer?.estimate ? `${says(sayWork(answer.work), flops(answer.estimate.flops.total))} (flopcalc ${data.version})` : `flopcalc ${data.version}`];
}

// What the command line would print; other views carry their own.
async function askExport(at) {
  return state.view === "flops" ? quick.ask(`export-${at}`, { what: "export", setup: state.setups[at] }) : {};
}

function line(name, text) {
  return h("div", { class: "line" }, h("span", { class: "minor" }, name), h("pre", { tabindex: "0", "aria-label": name }, text),
    h("button", { type: "button", onclick: async (event) => { if (await copy(text)) event.target.textContent = t("exports.copied"); } }, t("exports.copy")));
}

listeners();
main().catch((error) => say(String(error.message ?? error), true));
