"""What commands tell: tables, maps of cells, summaries."""
