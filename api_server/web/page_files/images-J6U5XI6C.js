import{d as v,h as $,n as h,p as y,s as o}from"./chunk-3QODNAS5.js";import"./chunk-SQE76S5B.js";var T="/v1/images/generations",_=3,w=_+1,M=10,k=4,A=60,D=2**31,u=$([]),p=$(null),i=$({});function S(t,a){u.value=u.value.map(n=>n.id===t?{...n,...a}:n)}async function N({id:t},a,n){try{for await(let{value:s}of h(T,a,{signal:n,requestId:t})){let r=s.type==="image_generation.completed",l=r?w:s.partial_image_index+1;if(S(t,{url:`data:image/png;base64,${s.b64_json}`,size:s.size,parts:l,done:r}),r)return}}catch(s){S(t,{problem:n.aborted?"Stopped.":s.message})}}async function C(t){let{prompt:a="",size:n="",count:s="1",seed:r="",steps:l="",guidance:e=""}=i.value,c=r===""?Math.floor(Math.random()*D):Number(r),x={model:t,prompt:a,stream:!0,partial_images:_,output_format:"png",...n.trim()&&{size:n.trim()},...l&&{num_inference_steps:Number(l)},...e&&{guidance_scale:Number(e)}},z=Math.min(Math.max(Number(s)||1,1),M),f=Array.from({length:z},(m,I)=>O(a,c+I));u.value=[...f,...u.value].slice(0,A);let g=new AbortController;p.value=g;let b=[...f],E=async()=>{for(let m=b.shift();m;m=b.shift())await N(m,{...x,seed:m.seed},g.signal)};await Promise.all(Array.from({length:k},E)),p.value=null}function O(t,a){return{id:`ui-${crypto.randomUUID?.()??`${Date.now()}-${a}`}`,prompt:t,seed:a,size:"",url:"",parts:0,done:!1,problem:""}}function F(){let t=y.value?.paints??[],[a,n]=v(""),s=t.find(({model:e})=>e===a)??t[0];if(!s)return o`<section class="images" aria-label="Images"><p>No model of this server paints.</p></section>`;let r=()=>{!p.value&&i.value.prompt?.trim()&&C(s.model)},l=e=>{e.key==="Enter"&&!e.shiftKey&&!e.isComposing?(e.preventDefault(),r()):e.key==="Escape"&&p.value?.abort()};return o`<section class="images" aria-label="Images">
    <form onSubmit=${e=>(e.preventDefault(),r())}>
      <label>What the picture shows<textarea rows="3" value=${i.value.prompt??""} onInput=${P("prompt")} onKeyDown=${l}></textarea></label>
      <div class="raw-fields">
        ${t.length>1&&o`<label>Model<select value=${s.model} onChange=${e=>n(e.target.value)}>
            ${t.map(({model:e})=>o`<option value=${e}>${e}</option>`)}
          </select></label>`}
        <${d} name="size" label="Size" type="text" placeholder=${s.size} />
        <${d} name="count" label="Pictures" min="1" max=${M} placeholder="1" />
        <${d} name="seed" label="Seed" min="0" placeholder="random" />
        <${d} name="steps" label="Steps" min="1" placeholder=${s.num_inference_steps} />
        <${d} name="guidance" label="Guidance" min="0" step="any" placeholder=${s.guidance_scale} />
      </div>
      <div class="buttons">
        ${p.value?o`<button key="stop" type="button" class="primary" onClick=${()=>p.value?.abort()}>Stop</button>`:o`<button key="paint" type="submit" class="primary" disabled=${!i.value.prompt?.trim()}>Paint</button>`}
      </div>
    </form>
    <p class="unseen" role="status" aria-live="polite">${R()}</p>
    <div class="pictures">${u.value.map(e=>o`<${K} key=${e.id} picture=${e} />`)}</div>
  </section>`}function R(){let t=u.value.filter(({done:a,problem:n})=>!a&&!n).length;return t?`${t} pictures are being painted.`:u.value.length?"All pictures are done.":""}function P(t){return a=>i.value={...i.value,[t]:a.target.value}}function d({name:t,label:a,...n}){return o`<label>${a}<input type="number" ...${n} value=${i.value[t]??""} onInput=${P(t)} /></label>`}function K({picture:t}){let{prompt:a,seed:n,size:s,url:r,parts:l,done:e,problem:c}=t;return o`<figure aria-busy=${!e&&!c}>
    ${r&&o`<img class="made" src=${r} alt=${e?a:`Preview: ${a}`} />`}
    ${!e&&!c&&o`<progress aria-label=${`Progress of seed ${n}`} max=${w} value=${l}></progress>`}
    ${c&&o`<p class="problem" role="alert">${c}</p>`}
    <figcaption>
      ${a} <span class="quiet">${[s,`seed ${n}`].filter(Boolean).join(" \xB7 ")}</span>
      ${e&&o`${" "}<a href=${r} download=${`tokenyard-${n}.png`}>Save</a>`}
    </figcaption>
  </figure>`}export{F as Images};
