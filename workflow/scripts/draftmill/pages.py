"""The shell of a report page: one file of HTML that holds its own style and script.

Knows how a page looks on a desk, on a phone, in the dark and on paper, and how to write text of unknown origin
into it. Must never know what a page says (report.py) or where it is written. Everything that comes from a config,
a prompt or a model goes through `escape`; the page's policy forbids all loading besides.
"""

from collections.abc import Iterable, Sequence

from draftmill.plots import escape

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2430;--soft:#5b6675;--rule:#dfe3e8;--wash:#f4f6f8;
--warn:#8a4b00;--warnwash:#fdf3e2;--s0:#3268b1;--s1:#dd7c1f;--s2:#23877b;--s3:#a24c8c;--s4:#7d8a1e;--s5:#4fa3cc;
--s6:#a0603c;--s7:#788493;--flag:#c22f2f;--on:#fff}
@media (prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e6eaef;--soft:#9da8b6;--rule:#303842;--wash:#1d232a;
--warn:#f2bd73;--warnwash:#33280f;--s0:#6fa3e6;--s1:#f0a04b;--s2:#4fc0b1;--s3:#d483bf;--s4:#b9c553;--s5:#86cdec;
--s6:#d39a76;--s7:#9aa7b5;--flag:#ff7b72;--on:#10141a}}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--soft:#444;--rule:#bbb;--wash:#f2f2f2;
--warn:#8a4b00;--warnwash:#fdf3e2;--s0:#3268b1;--s1:#dd7c1f;--s2:#23877b;--s3:#a24c8c;--s4:#7d8a1e;--s5:#4fa3cc;
--s6:#a0603c;--s7:#788493;--flag:#c22f2f;--on:#fff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:1040px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .4rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}
.lead{color:var(--soft);margin:0 0 1.4rem;max-width:46rem}.how{color:var(--soft);font-size:.88rem;max-width:46rem;
border-top:1px solid var(--rule);margin-top:2.2rem;padding-top:.8rem}
.warn{color:var(--warn);background:var(--warnwash);border-radius:8px;padding:.6rem .9rem;margin:.6rem 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin:0 0 1.6rem;padding:0}
.figures div{background:var(--wash);border-radius:10px;padding:14px 16px}
.figures dt{color:var(--soft);font-size:.85rem}.figures dd{margin:0}
.figures .big{font-size:1.6rem;white-space:nowrap;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.figures small{font-size:.65em;font-weight:600}
.figures .fine{color:var(--soft);font-size:.84rem;line-height:1.4}
.verdict{font-size:1.08rem;max-width:46rem;margin:.5rem 0}
figure{margin:0 0 2rem}figcaption{font-weight:600;margin:0 0 .4rem}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.85rem;color:var(--soft);margin-bottom:.3rem}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px;background:var(--c)}
.key i.dashed{height:0;border-top:2px dashed var(--c);border-radius:0;background:none;vertical-align:middle}
.s0{--c:var(--s0)}.s1{--c:var(--s1)}.s2{--c:var(--s2)}.s3{--c:var(--s3)}.s4{--c:var(--s4)}.s5{--c:var(--s5)}
.s6{--c:var(--s6)}.s7{--c:var(--s7)}
.canvas{position:relative}svg{display:block;width:100%;height:auto;touch-action:pan-y}
svg.narrow{display:none;max-width:520px;margin:0 auto}
svg text{font-size:12px;fill:var(--soft)}svg .end{text-anchor:end}svg .middle{text-anchor:middle}
svg .label{fill:var(--ink)}svg .note{font-size:11px}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1;fill:none}
.line{fill:none;stroke:var(--c);stroke-width:1.7;stroke-linejoin:round}.line.dashed{stroke-dasharray:5 4}
.line.total{stroke:var(--ink);stroke-width:1.2}.area{fill:var(--c);opacity:.72}.column{fill:var(--c)}
.span path{stroke:var(--c)}
.band{fill:var(--soft);opacity:.13}.band.steady{opacity:0}.band.ramp{opacity:.07}
.mark{fill:none;stroke:var(--soft);stroke-width:1;stroke-dasharray:4 3}.mark.restart{stroke:var(--flag)}
.mark.shard{stroke:var(--ink);stroke-dasharray:none}.flag{fill:var(--flag)}
.cross{stroke:var(--ink);stroke-width:1}
output{position:absolute;top:0;pointer-events:none;background:var(--paper);border:1px solid var(--rule);
border-radius:6px;padding:5px 9px;font-size:.8rem;line-height:1.4;white-space:nowrap;box-shadow:0 2px 8px #0003}
output i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px;background:var(--c)}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:4px 10px 4px 0;border-bottom:1px solid var(--rule)}
thead th{color:var(--soft);font-weight:500}tbody th{font-weight:500}
td.n,th.n{text-align:right;white-space:nowrap}td:last-child,th:last-child{padding-right:0}
.facts th{width:11rem}.bars th{width:26%;font-weight:500}.bars td:nth-child(2){width:44%}
.bar{display:inline-block;height:13px;min-width:2px;border-radius:3px;background:var(--c);vertical-align:middle}
.stack{display:grid;grid-template-columns:minmax(7rem,22%) 1fr;gap:10px;margin:5px 0;font-size:.9rem}
.stack b{font-weight:500}.stack>div{display:flex;border-radius:4px;overflow:hidden}
.stack span{background:var(--c);color:var(--on);font-size:.75rem;line-height:22px;height:22px;text-align:center;
overflow:hidden;white-space:nowrap}
.talk{border:1px solid var(--rule);border-radius:10px;padding:14px 16px;margin:0 0 1.4rem}
.talk h2{margin:0 0 .2rem}.talk .fine{color:var(--soft);font-size:.84rem;margin:0 0 .8rem}
.turn{margin:.6rem 0;padding:.5rem .8rem;border-left:3px solid var(--rule);background:var(--wash);
border-radius:0 8px 8px 0}.turn.sampled{border-left-color:var(--s2)}
.turn b{display:block;font-size:.78rem;color:var(--soft);font-weight:600}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font:inherit}
pre.code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--wash);border-radius:8px;
padding:14px 16px}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--soft)}
@media (max-width:700px){main{padding:18px 14px 36px}svg.wide{display:none}svg.narrow{display:block}
h1{font-size:1.35rem}.facts th{width:34%}.figures{grid-template-columns:1fr 1fr;gap:8px}.figures div{padding:10px 12px}
.figures .big{font-size:1.35rem}.bars th{width:34%}.bars td:nth-child(2){width:30%}
.stack{grid-template-columns:1fr;gap:1px;margin:9px 0}.figures div:last-child:nth-child(odd){grid-column:1/-1}
th,td{padding-right:6px}.cards thead{display:none}.cards tr{display:block;padding:6px 0;border-bottom:1px solid var(--rule)}
.cards th,.cards td{display:flex;justify-content:space-between;gap:14px;border:0;padding:1px 0;text-align:right;
white-space:normal}.cards th{text-align:left}.cards td::before{content:attr(data-head);color:var(--soft);
text-align:left;white-space:nowrap}}
@media print{svg.wide{display:block}svg.narrow{display:none}figure,.talk,.figures div{break-inside:avoid}
main{max-width:none;padding:0}details>summary{display:none}}
"""

FEW_COLUMNS = 6
"""Columns of numbers that a phone has room for."""

SCRIPT = """
for (const plot of document.querySelectorAll("figure.plot")) {
  const source = plot.querySelector("script");
  if (!source) continue;
  const data = JSON.parse(source.textContent);
  const box = plot.querySelector("output");
  const canvas = plot.querySelector(".canvas");
  for (const svg of plot.querySelectorAll("svg")) {
    const [left, right, top, floor] = ["left", "right", "top", "floor"].map((name) => +svg.dataset[name]);
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "path");
    cross.setAttribute("class", "cross");
    svg.append(cross);
    const hide = () => { box.hidden = true; cross.removeAttribute("d"); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / frame.width;
      const at = (event.clientX - frame.left) * scale;
      if (at < left || at > right || !data.x.length) return hide();
      const value = data.x0 + ((at - left) / (right - left)) * (data.x1 - data.x0);
      let low = 0, high = data.x.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (data.x[middle] <= value) low = middle; else high = middle;
      }
      const index = value - data.x[low] < data.x[high] - value ? low : high;
      const x = left + ((data.x[index] - data.x0) / (data.x1 - data.x0 || 1)) * (right - left);
      cross.setAttribute("d", `M${x} ${top}V${floor}`);
      box.replaceChildren(data.labels[index]);
      for (const one of data.series) {
        if (one.values[index] === null) continue;
        const row = document.createElement("div"), dot = document.createElement("i");
        dot.className = "s" + one.colour;
        row.append(dot, `${one.name}: ${one.values[index]}`);
        box.append(row);
      }
      box.hidden = false;
      const place = frame.left - canvas.getBoundingClientRect().left + x / scale;
      const room = canvas.clientWidth - box.offsetWidth;
      box.style.left = Math.max(0, Math.min(room, place > room - 12 ? place - box.offsetWidth - 12 : place + 12)) + "px";
    });
  }
}
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, lead: str, body: Iterable[str], how: str) -> str:
    """A whole page. `lead`, `how` and `title` are plain text; `body` is HTML that is escaped already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{"".join(body)}'
        f'<p class="how">{escape(how)}</p></main><script>{SCRIPT}</script></body></html>\n'
    )


def paragraph(text: str, kind: str = "") -> str:
    """One paragraph of plain text; `kind` is a class of the style (warn, verdict, fine)."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A second-level heading."""
    return f"<h2>{escape(text)}</h2>"


def figures(items: Sequence[tuple[str, str, str]]) -> str:
    """The large figures of the first page: (name, figure with its unit, fine print)."""

    def large(figure: str) -> str:
        value, space, unit = figure.partition(" ")
        return f"{escape(value)}{space}<small>{escape(unit)}</small>"

    cells = (
        f'<div><dt>{escape(name)}</dt><dd class="big">{large(figure)}</dd><dd class="fine">{escape(fine)}</dd></div>'
        for name, figure, fine in items
    )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table whose first column names the row; `numbers`: the others are right-aligned.

    Where it has many columns or text in them, a narrow page shows each row as a card with the heads beside it.
    """

    def cells(row: Sequence[str]) -> str:
        kind = ' class="n"' if numbers else ""
        rest = (
            f'<td{kind} data-head="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(head[1:], row[1:], strict=True)
        )
        return f'<th scope="row">{escape(row[0])}</th>{"".join(rest)}'

    kind = ' class="n"' if numbers else ""
    top = f"<th>{escape(head[0])}</th>" + "".join(f"<th{kind}>{escape(name)}</th>" for name in head[1:])
    lines = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    cards = ' class="cards"' if not numbers or len(head) > FEW_COLUMNS else ""
    return f"<table{cards}><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A two-column table of names and values."""
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows
    )
    return f'<table class="facts">{lines}</table>'


def code(text: str) -> str:
    """Text as it stands, in a fixed-width face."""
    return f'<pre class="code">{escape(text)}</pre>'


def folded(summary: str, content: str) -> str:
    """HTML behind a line that opens it; open in print by the reader's choice only."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
