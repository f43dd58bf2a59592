"""Tables of declared columns, and the files, pages and figures that show them.

- columns.py: a column is declared once for CSV, JSON, console, HTML and SQL.
- table.py: rows of declared columns, as text for any width, HTML, SQL and data frames.
- launches.py, outcomes.py: launches of a case pooled; figures that kinds of rows share.
- row_tables.py, page_table.py: what was measured as tables, on a terminal and on a page.
- export.py: rows to CSV, JSON and Parquet.
- page.py, figures.py: pages and figures as plain data; an HTML page that needs no network.
"""
