"""Words every folder uses; knows nothing of attention."""
