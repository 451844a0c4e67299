"""Style of the report's page: light and dark, wide and narrow. All rules hold within the class "iobs"."""

STYLE = """
.iobs { --ink: #243b53; --soft: #52606d; --page: #f5f7fa; --card: #fff; --line: #e1e6eb; --link: #2f6f9f;
  --zeros: #3d8b5f; --kept: #a9d3bb; --c0: #d9822b; --c1: #7b4fa3; --c2: #b3423a; --c3: #2a9d9a; --c4: #8a6d3b;
  --c5: #9aa5b1; color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .iobs { --ink: #e4e9ee; --soft: #a5b1bd; --page: #12181f; --card: #1c252e; --line: #33404c; --link: #7cb7e4;
    --kept: #2c5541; --c5: #66727e; color-scheme: dark; }
  .iobs img.figure { filter: invert(.9) hue-rotate(180deg); }
}
body.iobs { margin: 0; }
.iobs main { max-width: 58rem; margin: 0 auto; padding: 1rem; }
.iobs h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; margin: .5rem 0 1rem; }
.iobs h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
.iobs p { margin: 0 0 .75rem; color: var(--soft); font-size: .9rem; }
.iobs section { background: var(--card); border-radius: .6rem; padding: 1rem; margin: 1rem 0; }
.iobs pre { background: var(--card); border-radius: .6rem; padding: .7rem 1rem; margin: 1rem 0; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.iobs .facts { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(9.25rem, 1fr)); }
.iobs .facts div { background: var(--card); border-radius: .6rem; padding: .8rem .75rem; }
.iobs .facts b { display: block; font-size: 1.2rem; }
.iobs .facts span { color: var(--soft); font-size: .85rem; }
.iobs .bar { display: flex; height: 1.4rem; border-radius: .4rem; overflow: hidden; margin: .25rem 0 .75rem; }
.iobs .legend { list-style: none; padding: 0; margin: 0; font-size: .9rem; }
.iobs .legend li { padding-left: 1.4rem; position: relative; margin: .2rem 0; overflow-wrap: anywhere; }
.iobs .legend i { position: absolute; left: 0; top: .3em; width: .85rem; height: .85rem; border-radius: .2rem; }
.iobs .legend small { color: var(--soft); }
.iobs .pairs { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
.iobs .pairs div { border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem; font-size: .9rem;
  overflow-wrap: anywhere; }
.iobs .pairs b, .iobs figcaption b { color: var(--soft); font-size: .8rem; font-weight: 600; }
.iobs .prompt { font-style: italic; margin: .5rem 0 .4rem; color: var(--ink); }
.iobs .gallery { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); }
.iobs figure { margin: 0; font-size: .85rem; overflow-wrap: anywhere; }
.iobs figure img { width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: .4rem; image-rendering: pixelated; }
.iobs figcaption { line-height: 1.35; margin-top: .25rem; }
.iobs .changed { color: var(--c0); font-weight: 600; }
.iobs img.figure { display: block; width: 100%; max-width: 36rem; margin: .5rem auto; }
.iobs .scroll { overflow-x: auto; }
.iobs table { border-collapse: collapse; font-size: .85rem; width: 100%; margin: .5rem 0; color: var(--ink); }
.iobs th, .iobs td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid var(--line); background: none; }
.iobs td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.iobs th:first-child, .iobs td:first-child, .iobs .words td, .iobs .words th { text-align: left; }
.iobs .words td { white-space: normal; overflow-wrap: anywhere; }
.iobs summary { cursor: pointer; color: var(--link); }
.iobs ul { padding-left: 1.2rem; margin: 0; }
.iobs footer { color: var(--soft); font-size: .8rem; text-align: center; padding: 1rem; }
"""
