"""States, reasons and how they roll up. Pure tables; knows nothing of clocks, nodes or stores."""
