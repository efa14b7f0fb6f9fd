//! Webhooks as the API server meets them: real TLS, an authority from the Secret, rotation while reviews come in, and several
//! replicas that share one Secret.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that finds nothing has failed"
)]

#[path = "webhooks/api.rs"]
mod api;
#[path = "webhooks/keeping.rs"]
mod keeping;
#[path = "webhooks/serving.rs"]
mod serving;
