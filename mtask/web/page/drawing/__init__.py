"""Pure geometry: the pictures of tasks and flows, as numbers that the templates draw as SVG."""
