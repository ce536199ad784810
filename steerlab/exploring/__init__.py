"""Looking at what a model, a vector and a plan make of texts: token views, lenses, projections, plans on any model."""
