// What the server says, as values; a refusal becomes an Error with its sentence.

const headers = { authorization: `Bearer ${new URLSearchParams(location.search).get("token")}` };

export async function get(name, query = {}, signal) {
  const asked = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== "" && value !== null && value !== undefined) asked.set(key, value);
  }
  const answer = await fetch(`/api/${name}?${asked}`, { headers, signal });
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
  const asked = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== "" && value !== null && value !== undefined && !(key === "run" && Number(value) === 0)) asked.set(key, value);
  }
  const end = String(asked);
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${end ? `?${end}` : ""}`;
}

// The same place with other answers, without a step back in the browser's history.
export function adjust(changes) {
  const { view, id, query } = place();
  history.replaceState(null, "", link(view, id, { ...Object.fromEntries(query), ...changes }));
}
