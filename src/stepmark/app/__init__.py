"""Names by which earlier versions start ranks on this host."""
