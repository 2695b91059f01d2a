"""`check`: everything that can be known of a manifest before a rank is started."""
