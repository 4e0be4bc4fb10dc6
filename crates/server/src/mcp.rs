//! The tools over MCP: one handler for standard input and output and for HTTP, in every revision the SDK knows.

use std::sync::Arc;

use postrider::clock;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool as Described, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::Value;

use crate::http::Caller;
use crate::tools::{TOOLS, Tool, Tools};

const INSTRUCTIONS: &str = "Long-term memory that survives outages. Ask memory_query before deciding what may have been decided before; write what should outlast this session with memory_store. A `deferred` store is safe: it is queued and written later by itself, do not repeat it. When a query is `degraded`, rely less on what it finds.";

/// One connection's handler.
#[derive(Clone)]
pub struct Server {
    pub tools: Tools,
    /// Over HTTP each request brings its own.
    pub caller: Option<Caller>,
}

fn described(tool: &Tool) -> Described {
    let Value::Object(schema) = (tool.input)() else { return Described::new(tool.name, tool.about, Arc::default()) };
    let annotations = ToolAnnotations::with_title(tool.title)
        .read_only(tool.read_only)
        .destructive(false)
        .idempotent(tool.idempotent)
        .open_world(false);
    Described::new(tool.name, tool.about, Arc::new(schema)).with_title(tool.title).with_annotations(annotations)
}

impl Server {
    fn caller_of(&self, context: &RequestContext<RoleServer>) -> Result<Caller, ErrorData> {
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let caller = self.caller.clone().or_else(|| parts.and_then(|parts| parts.extensions.get().cloned()));
        caller.ok_or_else(|| ErrorData::internal_error("the request came without its caller", None))
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.server_info = Implementation::new("postrider", env!("CARGO_PKG_VERSION"));
        info.instructions = Some(INSTRUCTIONS.to_owned());
        info
    }

    fn get_tool(&self, name: &str) -> Option<Described> {
        crate::tools::tool(name).map(described)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        // A tool that would be refused is not offered.
        let caller = self.caller_of(&context)?;
        let offered = TOOLS.iter().filter(|tool| tool.permit(&caller).is_ok());
        Ok(ListToolsResult::with_all_items(offered.map(described).collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let parts = context.extensions.get::<axum::http::request::Parts>();
        let caller = self.caller_of(&context)?;
        if crate::tools::tool(&request.name).is_none() {
            return Err(ErrorData::invalid_params(format!("there is no tool `{}`", request.name), None));
        }
        let header = parts.and_then(|parts| parts.headers.get("x-correlation-id")?.to_str().ok());
        let correlation_id = header.map_or_else(new_correlation_id, str::to_owned);
        let arguments = request.arguments.unwrap_or_default();
        let answered = self.tools.call(&caller, &request.name, arguments, &correlation_id).await;
        let (failed, body) = (answered.is_error(), answered.body);
        let text = vec![ContentBlock::text(body.to_string())];
        let mut result = if failed { CallToolResult::error(text) } else { CallToolResult::success(text) };
        result.structured_content = Some(body);
        Ok(result.into())
    }
}

/// For calls that bring none.
pub fn new_correlation_id() -> String {
    format!("corr-{:016x}{:016x}", clock::seed(), clock::seed())
}
