// What the server says, as values; a refusal becomes an Error with its sentence.

const headers = { authorization: `Bearer ${new URLSearchParams(location.search).get("token")}` };

// What is set of a query.
function asked(query) {
  return new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
}

export async function get(name, query = {}, signal) {
  const answer = await fetch(`/api/${name}?${asked(query)}`, { headers, signal });
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ?? `the server answered ${answer.status}`);
  return value;
}

// The place in the page: `#/view/id?key=value`.
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...rest] = path.split("/");
  return { view: view || "curves", id: decodeURIComponent(rest.join("/")), query: new URLSearchParams(query) };
}

export function link(view, id = "", query = {}) {
  const end = String(asked({ ...query, run: Number(query.run) || "" }));
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${end ? `?${end}` : ""}`;
}

// The same place with other answers, without a step back in the browser's history.
export function adjust(changes) {
  const { view, id, query } = place();
  history.replaceState(null, "", link(view, id, { ...Object.fromEntries(query), ...changes }));
}
