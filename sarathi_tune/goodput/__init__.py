"""How much load an engine carries within its SLO: predicted on the virtual clock, searched, and checked. No torch."""
