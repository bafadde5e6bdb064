"""From what a gang printed, and how it ended, to cause and remedy. Values in, values out."""
