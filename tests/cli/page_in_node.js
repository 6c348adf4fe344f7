// Runs the script of a page with a document that holds only what the page uses; prints what it shows.
"use strict";
const fs = require("fs"), vm = require("vm");
const html = fs.readFileSync(process.argv[2], "utf8");
const scripts = [...html.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
const listeners = {};
class Node {
  constructor(text = "") { this.children = []; this.style = {}; this.own = text; }
  appendChild(child) { this.children.push(child); return child; }
  replaceChildren(...children) { this.children = children; }
  addEventListener(name, act) { listeners[name] = act; }
  getBoundingClientRect() { return {left: 0}; }
  getContext() { return new Proxy({measureText: (text) => ({width: 7 * text.length})},
    {get: (target, name) => target[name] || (() => {}), set: () => true}); }
  get clientWidth() { return 1076; }
  get clientHeight() { return 384; }
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own + this.children.map((one) => one.textContent).join("\t"); }
}
const known = new Map();
const find = (id) => {
  if (!known.has(id)) known.set(id, new Node());
  return known.get(id);
};
find("data").textContent = scripts.find((one) => one[1].includes("json"))[2];
const document = {
  getElementById: find, createElement: () => new Node(), createTextNode: (text) => new Node(text),
};
const location = {hash: process.argv[3] || ""};
const window = {addEventListener: () => {}};
vm.runInNewContext(scripts.find((one) => !one[1].includes("json"))[2],
  {document, location, window, JSON, Math, Map, Number});
const shown = () => ["title", "moment"].map((id) => find(id).textContent)
  .concat(["owners", "blocks"].map((id) => find(id).children.map((row) => row.textContent)));
const pages = [shown()];
for (const left of process.argv.slice(4)) {
  listeners.pointermove({clientX: Number(left)});
  pages.push(shown());
}
console.log(JSON.stringify(pages));
