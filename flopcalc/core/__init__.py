"""What is computed: specs, workloads, models, recipes, counts, estimates; pure Python."""
