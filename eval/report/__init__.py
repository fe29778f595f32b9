"""Self-contained HTML reports: functions that return markup, and a page of sections.

- `page`: text, facts, images, sections, and the whole page
- `style`: the style sheet
- `comparison`: two models side by side, for pages and the terminal
- `grids`: retrieval grids with images
- `figures`: curves, reliability diagrams, distributions
- `statements`: results as sentences
"""
