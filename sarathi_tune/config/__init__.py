"""What a run is asked to do, as frozen values built once at the edge and passed down."""
