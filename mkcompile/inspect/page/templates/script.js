(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (isDark) => root.setAttribute("data-theme", isDark ? "dark" : "light");
  setTheme(dark.matches);
  dark.addEventListener("change", (event) => setTheme(event.matches));
  document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));

  // Hovering over a site's line, bar or chip lights up all that belongs to it.
  const bySite = new Map();
  for (const one of document.querySelectorAll("[data-site]")) {
    const site = one.dataset.site;
    if (!bySite.has(site)) bySite.set(site, []);
    bySite.get(site).push(one);
  }
  document.addEventListener("mouseover", (event) => {
    const cell = event.target.closest?.(".line .cell");
    if (cell && !cell.title) cell.title = cell.textContent.trim();
  });
  const light = (event, on) => {
    const one = event.target.closest?.("[data-site]");
    for (const other of bySite.get(one?.dataset.site) ?? []) other.classList.toggle("hot", on);
  };
  document.addEventListener("mouseover", (event) => light(event, true));
  document.addEventListener("mouseout", (event) => light(event, false));

  // A link to a site opens it; a click on a line or bar goes there.
  const open = (id) => {
    const site = document.getElementById(id);
    if (!site) return;
    site.open = true;
    site.scrollIntoView();
  };
  addEventListener("hashchange", () => open(location.hash.slice(1)));
  for (const one of document.querySelectorAll(".timeline [data-site], .line .badge")) {
    one.style.cursor = "pointer";
    one.addEventListener("click", () => open(`site-${one.closest("[data-site]").dataset.site}`));
  }
  if (location.hash) open(location.hash.slice(1));
})();
